"""`keystage bench gateway`: a short run has its figures, over real proxies."""

from __future__ import annotations

import math

import pytest
from support.servers import need_program

from keystage.bench import gateway, gateway_nginx
from keystage.bench.frame import BenchError


@pytest.mark.slow
def test_a_short_run_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    need_program("nginx")
    monkeypatch.setattr(gateway, "ROUND_S", 0.3)
    monkeypatch.setattr(gateway, "LIGHT_S", 0.1)
    result = gateway.run(quick=True)
    names = ["keystage gateway", "nginx", "FastAPI + aiohttp", "its server alone", "direct"]
    assert [row["proxy"] for row in result.rows] == names
    assert set(result.figures) == {"rps_ratio_nginx", "added_ms_p50", "naive_ratio_nginx"}
    assert all(len(figure.samples) == 2 for figure in result.figures.values())
    assert all(math.isfinite(value) for figure in result.figures.values() for value in figure.samples)
    assert "/proc/PID/stat" in result.notes[0]


def test_without_nginx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_nginx, "PROGRAM", "nginx-that-is-not-here")
    with pytest.raises(BenchError, match="not installed"):
        gateway.run(quick=True)
