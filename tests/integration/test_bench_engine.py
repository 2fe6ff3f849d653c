"""`bench engine` on a CPU, whole, with a tiny model: rows, figures, equal answers, and the page."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.tiny_llama import tiny_model, write_folder

from keystage.bench import engine_report
from keystage.bench.engine_client import Answer, Together
from keystage.bench.engine_cpu import Place, measure
from keystage.bench.engine_cpu_result import Rounds, Setting, result_of
from keystage.bench.engine_rival import Generated, TransformersProcess
from keystage.bench.frame import BenchError, BenchResult, Figure, document
from keystage.bench.machine_use import MachineUse
from keystage.bundle.split import split

PROMPTS = [[3 + i, 5, 7, 11 * i + 1] for i in range(3)]
FIGURES = {
    "cpu_ratio_b1",
    "cpu_ratio_b8",
    "cpu_ratio_b8_sequential",
    "cpu_vs_own_one_stage_b1",
    "cpu_ratio_b1_all_cores",
    "cpu_ratio_b8_all_cores",
}


@pytest.mark.slow
def test_ours_and_the_rival_answer_alike_and_every_figure_is_there(tmp_path: Path) -> None:
    model = write_folder(tiny_model(), tmp_path / "model")
    bundle = split(model, 3, "uniform", tmp_path / "three", "three")
    whole = split(model, 1, "uniform", tmp_path / "one", "one")
    with TransformersProcess(model, "float32") as rival:
        alone = rival.generate(PROMPTS[:1], 5, 1)
        assert [len(ids) for ids in alone.ids] == [5]
        assert rival.generate(PROMPTS, 5, 1).ids[0] == alone.ids[0]
        found = asyncio.run(measure(Place(tmp_path / "home", bundle, whole), rival, PROMPTS, 2, 5))
    result = result_of(found, "a tiny model")
    assert set(result.figures) == FIGURES
    assert all(len(figure.samples) == 2 and min(figure.samples) > 0 for figure in result.figures.values())
    assert [row["at once"] for row in result.rows] == [1, 1, 1, 3, 3, 1, 3]
    assert all(row["least"] <= row["tokens/s"] <= row["most"] for row in result.rows)
    assert any(note.startswith("8 of 8 greedy answers equal") for note in result.notes), result.notes


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="transformers"), TransformersProcess(tmp_path, "float32"):
        raise AssertionError("came up")


def test_the_page_keeps_what_other_machines_measured(tmp_path: Path) -> None:
    figures = {"cpu_ratio_b1": Figure([1.1, 1.2, 1.3], "tokens/s / tokens/s")}
    rows = [{"system": "a | b", "tokens/s": 12.3456}]
    made = document("engine", BenchResult(rows, figures, ["how it was done"]))
    engine_report.write(tmp_path, "cpu", made)
    gpu = json.loads(json.dumps(made))
    gpu["machine"]["torch_device"] = "Some GPU"
    gpu["noisy"], gpu["is_result"] = ["cpu_ratio_b1"], False
    page = engine_report.write(tmp_path, "gpu", gpu).read_text()
    assert page.index("## cpu: ") < page.index("## gpu: Some GPU")
    assert page.count("| a / b | 12.35 |") == 2
    assert "| `cpu_ratio_b1` | 1.2 | 1.15 .. 1.25 | 3 | at least 1 |" in page
    assert page.count("Not a result: cpu_ratio_b1 spread too widely") == 1
    assert "- how it was done" in page


@pytest.mark.parametrize("content", [None, b"{", b"{}"])
def test_a_folder_without_documents_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "engine-cpu.json").write_bytes(content)
    with pytest.raises(BenchError, match="engine-"):
        engine_report.render(tmp_path)


def test_a_run_beside_other_programs_is_no_result() -> None:
    one, four = Setting(1, 2, 1), Setting(4, 2, 1)
    answer = Answer([1, 2, 3], 0.5, 1.5, [(0.5, 1), (1.0, 2), (1.5, 3)])
    found = Rounds(3, 2, 2, "5", rival_threads=(1, 2))
    for setting, requests in ((four, 1), (one, 1), (four, 2)):
        found.add(setting, requests, Together([answer] * requests, 1.5))
    found.rival_alone.append(Generated(3.0, [[1, 2, 3]]))
    found.rival_batched.append(Generated(3.0, [[1, 2, 3], [1, 2, 4]]))
    result = result_of(found, "a model")
    assert result.disturbance == ""
    assert {key: figure.median for key, figure in result.figures.items()} == {
        "cpu_ratio_b1": 2.0,
        "cpu_ratio_b8": 2.0,
        "cpu_ratio_b8_sequential": 4.0,
        "cpu_vs_own_one_stage_b1": 1.0,
        "cpu_ratio_b1_all_cores": 2.0,
        "cpu_ratio_b8_all_cores": 2.0,
    }
    assert any(note.startswith("2 of 3 greedy answers") for note in result.notes)
    found.others_cores = 0.7
    assert result_of(found, "a model").disturbance == "other programs used 0.7 of 2 cores meanwhile"
    assert not document("engine", result_of(found, "a model"))["is_result"]


def test_what_other_programs_use_is_told_apart_from_what_we_do() -> None:
    use = MachineUse()
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        pass
    assert 0 <= use.others_cores() <= os.cpu_count() - 0.2  # type: ignore[operator]


def test_a_process_that_is_none_of_ours_counts_for_others() -> None:
    begin_s = time.monotonic()
    use = MachineUse()
    # In the shell's background, and the shell ends: its parent is then none of ours.
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ntime.sleep(60)"
    shell = ["/bin/sh", "-c", '"$0" -c "$1" & echo $!', sys.executable, spin]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        pid = int(asked.stdout.readline())
        asked.wait()
        try:
            assert asked.stdout.readline() == "1\n"
            others_s = use.others_cores() * (time.monotonic() - begin_s)
        finally:
            os.kill(pid, signal.SIGKILL)
    assert others_s >= 0.4
