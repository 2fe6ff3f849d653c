"""The table of `bench engine` on GPUs is made of whatever lines were written before a lease ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from keystage.bench import engine, engine_gpu, engine_gpu_bench, engine_gpu_parts
from keystage.bench.engine_gpu_bench import DRY, Bench
from keystage.bench.engine_gpu_parts import PARTS, Part, measure
from keystage.bench.engine_gpu_process import OrderError, Orders
from keystage.bench.engine_gpu_record import Record, read
from keystage.bench.engine_gpu_table import main, result
from keystage.bench.engine_gpu_timeline import class_of
from keystage.bench.engine_gpu_world import Up
from keystage.bench.frame import BenchError
from keystage.bundle.source_random import random_parameters

CUT, EAGER = "8 stages, 1 worker", "transformers eager"


def step(system: str, seconds: float, batch: int = 1, gpus: int = 1, beside: str = "") -> dict[str, Any]:
    return {"gpus": gpus, "system": system, "batch": batch, "seconds": seconds, "beside": beside}


def record(path: Path) -> Record:
    found = Record(path)
    found.add(
        "limit", bytes_per_s=4e12, read_bytes=12_800_000_000, seconds=0.0032, parameters=6_700_000_000,
        source="random:llama-7b", dtype="bfloat16", stages=8, transformers="5.0",
    )  # fmt: skip
    for number in range(3):
        found.add("step", **step(CUT, 0.0045 + number * 1e-4))
        found.add("step", **step(EAGER, 0.0225 + number * 5e-4, beside=CUT))
        found.add("step", **step("1 stage", 0.0046))
        found.add("step", **step("8 stages, 8 workers", 0.0052))
    found.add("step", **step(CUT, 0.0075, 32))
    found.add("step", **step(EAGER, 0.0225, 32, beside=CUT))
    found.add("step", **step("8 stages, 2 workers", 0.005, 32, 2))
    found.add("step", **step("8 stages, 2 workers", 0.005, 1, 2))
    found.add("step", **step("transformers eager, device map over 2", 0.03, 1, 2, "8 stages, 2 workers"))
    found.add("first", gpus=1, system=CUT, prompt=512, seconds=0.021)
    found.add("rate", gpus=1, system="bert-large, 4 stages", items_per_s=900.0)
    found.add(
        "timeline", rows=1, wall_us=4300.0, busy_us=4100.0, kernels=[["matrices", 3900.0, 129.0]], top=[]
    )
    found.add("error", text="transformers: no compiler")
    found.add("log", system="8 stages, 2 workers, 4 waves", text="the router's last lines")
    found.add("error", text="TimeoutError: ")
    return found


def test_figures_and_rows_are_made_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "engine-gpu.jsonl"
    record(path)
    with path.open("a") as file:
        file.write('{"kind": "step", "gpus": 1, "sys')  # the lease ended here
    made = result(read([path]))
    figures = {name: round(figure.median, 3) for name, figure in made.figures.items()}
    assert figures["ms_per_token_b1"] == 4.6
    assert figures["vs_limit_b1"] == pytest.approx(1.438, abs=1e-3)
    assert figures["vs_own_one_stage_b1"] == 1.0
    assert figures["vs_transformers_b1"] == 5.0
    assert figures["tokens_per_s_b32_ratio"] == 3.0
    assert figures["vs_device_map_b1"] == figures["vs_device_map_b1_2gpus"] == 6.0
    assert figures["tokens_per_s_b32_2gpus_vs_1"] == 1.5
    assert figures["boundary_us_8_stages_8_workers"] == pytest.approx(1e6 * 0.0006 / 7, abs=1)
    rows = {(row["GPUs"], row["system"]): row for row in made.rows}
    assert rows[1, CUT]["ms to first, 512"] == 21.0
    assert rows[1, "bert-large, 4 stages"]["items/s"] == 900.0
    assert any("129" in note and "3900 us" in note for note in made.notes)
    assert made.notes[-2:] == [
        "Not measured: transformers: no compiler",
        "Not measured: 8 stages, 2 workers, 4 waves: no time was left",
    ]


def test_records_of_several_leases_make_one_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "a.jsonl")
    Record(tmp_path / "engine-h200.jsonl").add("step", **step("8 stages, 4 workers", 0.006, 1, 4))
    main([str(tmp_path / "page"), str(tmp_path / "a.jsonl"), str(tmp_path / "engine-h200.jsonl")])
    page = (tmp_path / "page" / "engine.md").read_text()
    assert "## h200" in page
    assert "| 4 | 8 stages, 4 workers |" in page
    assert json.loads((tmp_path / "page" / "engine-h200.json").read_text())["figures"]["vs_transformers_b1"]
    assert capsys.readouterr().out.strip().endswith("engine.md")


def test_a_page_made_elsewhere_names_the_machine_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "engine-h200.jsonl"
    facts = {
        "cpu_model": "a host", "cores": 16, "memory_bytes": 1, "system": "Linux", "python": "3.12",
        "torch": "2.11", "torch_device": "cuda NVIDIA H200",
    }  # fmt: skip
    record(path).add("machine", **facts)
    main([str(tmp_path / "page"), str(path)])
    assert "## h200: cuda NVIDIA H200" in (tmp_path / "page" / "engine.md").read_text()
    assert json.loads((tmp_path / "page" / "engine-h200.json").read_text())["machine"] == facts


def test_a_part_that_fails_in_any_way_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bad(_bench: Bench) -> None:
        raise KeyError("no such kernel")

    async def slow(_bench: Bench) -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(60)

    async def good(bench: Bench) -> None:
        bench.record.add("step", **step("a", 1.0))

    parts = {"bad": Part(bad, 60), "slow": Part(slow, 60), "good": Part(good, 60)}
    monkeypatch.setattr(engine_gpu_parts, "PARTS", parts)
    bench = Bench(Record(tmp_path / "l.jsonl"), DRY, 1, True, tmp_path, cast("Orders", None))
    asyncio.run(measure(bench, list(parts), 600.0))
    assert [line["text"] for line in bench.record.lines if line["kind"] == "error"] == [
        "KeyError: 'no such kernel'",
        "TimeoutError: ",
    ]
    assert [line["system"] for line in bench.record.lines if line["kind"] == "step"] == ["a"]


def test_a_bundle_goes_only_where_the_disk_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Record(tmp_path / "l.jsonl"), DRY, 1, True, tmp_path, cast("Orders", None))
    bundle = tmp_path / "bundle"
    (bundle / "stages").mkdir(parents=True)
    monkeypatch.setattr(engine_gpu_bench, "SPARE_BYTES", 1)
    bench.spare(bundle)
    assert bundle.is_dir()
    monkeypatch.setattr(engine_gpu_bench, "SPARE_BYTES", 1 << 80)
    bench.spare(bundle)
    assert not bundle.exists()


def test_which_way_tensors_took_is_read_from_the_workers_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for number in range(2):
        (tmp_path / "logs" / f"w{number}.log").write_text(
            "2026-01-01 INFO keystage.worker: w is ready\n"
            "2026-01-01 INFO keystage.worker.device_lane: tensors for ipc:///tmp/ks-1/b.w go through "
            "device memory\n"
            f"2026-01-01 WARNING keystage.worker.cuda_lane: no handle {number}\n"
        )
    up = Up("", cast("Any", None), cast("Any", None), tmp_path)
    assert up.hand_offs() == ["tensors for b.w go through device memory", "no handle 0", "no handle 1"]


def test_idle_parts_of_workers_are_read_from_their_events(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()

    def write(name: str, stages: list[int], *waves: tuple[float, float]) -> None:
        lines = [{"t": 1.0, "event": "route"}]
        lines += [{"t": t, "event": "wave", "stages": stages, "compute_s": s} for t, s in waves]
        (tmp_path / "events" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("z.jsonl", [0, 3], (9.9, 0.5), (10.1, 0.2), (10.5, 0.3), (12.1, 0.9))
    write("a.jsonl", [4, 7], (10.8, 0.8), (11.0, 0.2), (11.9, 0.5))
    write("router.jsonl", [])
    up = Up("", cast("Any", None), cast("Any", None), tmp_path)
    assert up.idle_parts(10.0, 12.0) == pytest.approx([0.8, 0.25])


def test_bubbles_are_told_for_systems_of_several_workers(tmp_path: Path) -> None:
    found = record(tmp_path / "engine-gpu.jsonl")
    found.add("idle", gpus=2, system="8 stages, 2 workers", batch=32, parts=[0.1, 0.3])
    found.add("idle", gpus=2, system="8 stages, 2 workers", batch=32, parts=[0.2, 0.5])
    found.add("idle", gpus=1, system=CUT, batch=32, parts=[0.1])
    notes = [note for note in result(found.lines).notes if note.startswith("bubbles")]
    assert len(notes) == 1
    assert notes[0].endswith("8 stages, 2 workers (2 GPUs): b32 15, 40 %")


def test_a_burst_is_told_in_a_sentence(tmp_path: Path) -> None:
    found = Record(tmp_path / "engine-gpu.jsonl")
    times = {"ready_s": 0.11, "work_s": 0.12, "before_s": 0.0051, "after_s": 0.0049, "gap_s": 0.07}
    found.add("burst", gpus=8, stage=3, via="standby", source="gpu", **times)
    made = result(found.lines)
    assert not made.rows
    assert any("by standby from gpu: ready 0.11 s and first work 0.12 s" in note for note in made.notes)


def test_more_gpus_than_there_are_and_models_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_gpu, "_gpus", lambda: 2)
    with pytest.raises(BenchError, match="--gpus 8: this machine shows 2"):
        engine_gpu.run(gpus=8, out=tmp_path)
    with pytest.raises(BenchError, match="for GPUs"):
        engine.run(cpu=True, gpus=2, out=tmp_path)
    bench = Bench(Record(tmp_path / "l.jsonl"), DRY, 2, True, tmp_path / "bundles", cast("Orders", None))
    with pytest.raises(BenchError, match="1000000000 GB of parameters on a disk with"):
        bench.check_room(10**18, 2)
    monkeypatch.setattr(engine_gpu_bench, "SPARE_BYTES", 0)
    bench.check_room(1000, 2)
    assert [Bench(bench.record, DRY, n, True, tmp_path, bench.rival).several for n in (1, 4, 7, 8)] == [
        [], [2, 4], [2, 4], [2, 4, 8]
    ]  # fmt: skip


def test_shapes_have_the_parameters_they_are_named_after() -> None:
    found = {shape: round(random_parameters(shape) / 1e9, 1) for shape in ("llama-7b", "opt-13b", "opt-66b")}
    assert found == {"llama-7b": 6.7, "opt-13b": 12.9, "opt-66b": 65.7}


def test_nothing_measured_is_an_error_that_says_why(tmp_path: Path) -> None:
    lines = Record(tmp_path / "lines.jsonl")
    lines.add("error", text="stage 3 does not fit")
    with pytest.raises(BenchError, match="stage 3 does not fit"):
        result(lines.lines)


def test_an_unknown_part_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no parts x; there are limit, each, one"):
        engine_gpu.run(parts=["each", "x"], dry=True, out=tmp_path)
    assert list(PARTS)[:2] == ["limit", "each"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "matrices"),
        ("_part_kernel", "attention"),
        ("_place_kernel", "rotation and write into blocks"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::elementwise_kernel", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind


def test_an_order_that_fails_is_told_and_the_next_is_carried_out() -> None:
    from keystage.bench.engine_gpu_timeline import answer as other

    with Orders(other, "copy") as orders:
        with pytest.raises(OrderError, match=r"copy: .*KeyError: 'device'"):
            orders.ask(60.0, do="bandwidth")
        assert orders.ask(60.0, do="bandwidth", device="cpu") > 1e6
    with pytest.raises(BenchError, match="copy has ended"):
        orders.ask(1.0, do="bandwidth")
