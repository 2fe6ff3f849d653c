"""Rows and figures of `keystage bench engine` on GPUs, from the lines that its parts have written.

`python -m keystage.bench.engine_gpu_table FOLDER LINES...` adds them to the page in FOLDER, for records that
were copied from the machine that has the GPUs; the section's name is the last argument's stem.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench import engine_report
from keystage.bench.engine_gpu_record import Line, read
from keystage.bench.engine_report import TARGETS
from keystage.bench.frame import BenchError, BenchResult, Figure, document


def _errors(lines: Sequence[Line]) -> list[str]:
    """What failed: a world that ends in an error tells its logs first, and so whose it is."""
    found = []
    for before, line in itertools.pairwise([{"kind": ""}, *lines]):
        if line["kind"] == "error":
            whose = f"{before['system']}: " if before["kind"] == "log" else ""
            text = line["text"].strip()
            found.append(whose + ("no time was left" if text == "TimeoutError:" else text))
    return found


class Measured:
    """Samples by (GPUs, system, size).

    Args:
        lines: of records.

    Attributes:
        limit: the line of that kind, empty without.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._step: dict[tuple[int, str, int], list[float]] = defaultdict(list)
        self._beside: dict[tuple[int, str, int], list[float]] = defaultdict(list)
        self._first: dict[tuple[int, str, int], list[float]] = defaultdict(list)
        self._rate: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._waves: dict[tuple[int, str], dict[str, float]] = {}
        self._idle: dict[tuple[int, str, int], list[list[float]]] = defaultdict(list)
        self.limit: Line = {}
        self.timelines = [line for line in lines if line["kind"] == "timeline"]
        self.bursts = [line for line in lines if line["kind"] == "burst"]
        self.errors = _errors(lines)
        for line in lines:
            self._take(line)

    def _take(self, line: Line) -> None:
        match line["kind"]:
            case "step":
                self._step[line["gpus"], line["system"], line["batch"]].append(line["seconds"])
                if line.get("beside"):
                    self._beside[line["gpus"], line["beside"], line["batch"]].append(line["seconds"])
            case "first":
                self._first[line["gpus"], line["system"], line["prompt"]].append(line["seconds"])
            case "rate":
                self._rate[line["gpus"], line["system"]].append(line["items_per_s"])
            case "waves":
                self._waves[line["gpus"], line["system"]] = line["seconds"]
            case "idle":
                self._idle[line["gpus"], line["system"], line["batch"]].append(line["parts"])
            case "limit":
                self.limit = line

    def step(self, gpus: int, system: str, batch: int) -> list[float]:
        """Seconds per step."""
        return self._step.get((gpus, system, batch), [])

    def beside(self, gpus: int, system: str, batch: int) -> list[float]:
        """Seconds per step of the rival that ran in the rounds of `system`."""
        return self._beside.get((gpus, system, batch), [])

    @property
    def systems(self) -> list[tuple[int, str]]:
        """(GPUs, system), in the order in which they were measured."""
        keys = [*((g, s) for g, s, _ in self._step), *((g, s) for g, s, _ in self._first), *self._rate]
        return list(dict.fromkeys(keys))

    def rows(self) -> list[dict[str, Any]]:
        """The table."""
        batches = sorted({batch for _, _, batch in self._step})
        prompts = sorted({prompt for _, _, prompt in self._first})
        return [self._row(*key, batches, prompts) for key in self.systems]

    def idle(self) -> list[str]:
        """What part of the time each worker computed nothing, a line for each system of several."""
        found: dict[tuple[int, str], list[str]] = defaultdict(list)
        for (gpus, system, batch), rounds in self._idle.items():
            if len(rounds[0]) > 1:
                parts = np.median([r for r in rounds if len(r) == len(rounds[0])], axis=0)
                found[gpus, system].append(f"b{batch} " + ", ".join(f"{100 * part:.0f}" for part in parts))
        return [f"{system} ({gpus} GPUs): {'; '.join(texts)} %" for (gpus, system), texts in found.items()]

    def _row(self, gpus: int, system: str, batches: list[int], prompts: list[int]) -> dict[str, Any]:
        row: dict[str, Any] = {"GPUs": gpus, "system": system}
        for batch in batches:
            found = self.step(gpus, system, batch)
            row[f"ms/step b{batch}"] = 1e3 * float(np.median(found)) if found else ""
        for batch in batches:
            found = self.step(gpus, system, batch)
            row[f"tokens/s b{batch}"] = batch / float(np.median(found)) if found else ""
        for prompt in prompts:
            found = self._first.get((gpus, system, prompt), [])
            row[f"ms to first, {prompt}"] = 1e3 * float(np.median(found)) if found else ""
        found = self._rate.get((gpus, system), [])
        row["items/s"] = float(np.median(found)) if found else ""
        waves = self._waves.get((gpus, system), {})
        row["ms in workers b1"] = 1e3 * waves["1"] if "1" in waves else ""
        return row


def result(lines: Sequence[Line]) -> BenchResult:
    """Rows, figures and notes.

    Raises:
        BenchError: there is nothing to be shown.
    """
    measured = Measured(lines)
    if not (measured.systems or measured.timelines or measured.bursts):
        raise BenchError(f"nothing was measured: {'; '.join(measured.errors) or 'no part ran'}"[:2000])
    found = {name: figure for name, figure in _figures(measured).items() if figure.samples}
    targeted = {
        name: Figure(f.samples, f.meaning, TARGETS.get(name, ""), f.max_spread_ratio)
        for name, f in found.items()
    }
    notes = [
        *_about(measured),
        *_times(measured),
        *_bubbles(measured),
        *_bursts(measured),
        *(f"Not measured: {text}" for text in measured.errors),
    ]
    return BenchResult(measured.rows(), targeted, notes)


def _figures(measured: Measured) -> dict[str, Figure]:
    stages = int(measured.limit.get("stages", 8))
    cut = f"{stages} stages, 1 worker"
    ours = measured.step(1, cut, 1)
    figures = {
        "ms_per_token_b1": Figure([1e3 * s for s in ours], f"{cut}, one GPU, milliseconds a token"),
        "vs_own_one_stage_b1": _ratio(ours, measured.step(1, "1 stage", 1), f"{cut} / one stage"),
        "vs_transformers_b1": _ratio(measured.beside(1, cut, 1), ours, "eager transformers / ours"),
        "tokens_per_s_b32_ratio": _ratio(
            measured.beside(1, cut, 32), measured.step(1, cut, 32), "ours / eager transformers, batch 32"
        ),
    }
    if measured.limit:
        least_s = float(measured.limit["seconds"])
        figures["vs_limit_b1"] = Figure([s / least_s for s in ours], f"{cut} / reading all parameters once")
    alone = measured.step(1, cut, 32)
    several = [gpus for gpus in (2, 4, 8) if measured.step(gpus, f"{stages} stages, {gpus} workers", 1)]
    for gpus in several:
        name = f"{stages} stages, {gpus} workers"
        figures[f"vs_device_map_b1_{gpus}gpus"] = _ratio(
            measured.beside(gpus, name, 1), measured.step(gpus, name, 1), f"device map over {gpus} / ours"
        )
        figures[f"tokens_per_s_b32_{gpus}gpus_vs_1"] = _ratio(
            alone, measured.step(gpus, name, 32), f"tokens/s on {gpus} GPUs / on one"
        )
    if several:
        figures["vs_device_map_b1"] = figures[f"vs_device_map_b1_{several[0]}gpus"]
    for count in (2, 3, 4):
        figures[f"tokens_per_s_{count}_replicas_ratio"] = _ratio(
            [count * s for s in measured.step(1, "1 replicas", 32)],
            measured.step(count, f"{count} replicas", 32 * count),
            f"tokens/s of {count} replicas / of one, {32 * count} and 32 requests",
        )
    return figures | _boundaries(measured)


def _ratio(over: list[float], under: list[float], meaning: str) -> Figure:
    return Figure([a / b for a, b in zip(over, under, strict=False)], meaning)


def _boundaries(measured: Measured) -> dict[str, Figure]:
    """Price of a boundary between workers on one GPU, microseconds a step."""
    found: dict[str, Figure] = {}
    for gpus, system in measured.systems:
        stages, _, workers = system.partition(" stages, ")
        count = workers.split(" ")[0]
        if gpus != 1 or not stages.isdigit() or not count.isdigit() or int(count) < 2:
            continue
        together = measured.step(1, f"{stages} stages, 1 worker", 1)
        apart = measured.step(1, system, 1)
        samples = [1e6 * (a - float(np.median(together))) / (int(count) - 1) for a in apart if together]
        found[f"boundary_us_{stages}_stages_{count}_workers"] = Figure(
            samples, "microseconds a boundary of workers, batch 1"
        )
    return found


def _about(measured: Measured) -> list[str]:
    limit, notes = measured.limit, []
    if limit:
        notes.append(
            f"{limit['source']}: {limit['parameters'] / 1e9:.2f} B parameters in {limit['dtype']}; reading "
            f"them once takes {limit['seconds'] * 1e3:.2f} ms at a copy's "
            f"{limit['bytes_per_s'] / 1e12:.2f} TB/s; transformers {limit['transformers']}: eager is a "
            "plain loop of forward calls (quicker than generate), compiled is generate with a static "
            "cache; no other engine was there"
        )
    notes.append(
        "ours: through HTTP, router and workers, greedy; ms/step and tokens/s while all requests of the "
        "batch decode; `ms in workers` is from a wave's arrival at a worker's GPU code to its result, summed "
        "over the path; several stages of one worker run as one span, so `16 stages, 4 workers` is also four "
        "stages in a worker each"
    )
    return notes


def _times(measured: Measured) -> list[str]:
    """Where a step's time goes, a note for each number of rows."""
    notes = []
    for line in measured.timelines:
        parts = ", ".join(f"{kind} {us:.0f} us in {count:.0f}" for kind, us, count in line["kernels"])
        idle_us = line["wall_us"] - line["busy_us"]
        notes.append(
            f"a step of {line['rows']} rows, in the span alone: {line['wall_us']:.0f} us, of which kernels "
            f"{line['busy_us']:.0f} (time, launches: {parts}), launch, waiting and host {idle_us:.0f}"
        )
    return notes


def _bubbles(measured: Measured) -> list[str]:
    return [
        f"bubbles, the part of the time in which a worker computed nothing, {text}"
        for text in measured.idle()
    ]


def _waits(line: Line) -> str:
    """What a record tells beyond the longest wait; those before told no more."""
    if "paused" not in line:
        return ""
    return (
        f" (from {line['gap_at_s']:.2f} s after the decision on; before it {line['before_gap_s']:.2f} s; "
        f"{line['paused']} waits of over 0.1 s), {line['moves']} moves, {line['late_copies']} copies late, "
        f"{line['replayed_tokens']} tokens replayed, {line['preemptions']} sessions preempted"
    )


def _bursts(measured: Measured) -> list[str]:
    return [
        f"stage {line['stage']} doubled while serving ({line['gpus']} GPUs), by {line['via']} from "
        f"{line['source']}: ready {line['ready_s']:.2f} s and first work {line['work_s']:.2f} s after the "
        f"decision; {1e3 * line['before_s']:.1f} ms a token before, {1e3 * line['after_s']:.1f} after; the "
        f"longest wait for a token meanwhile {line['gap_s']:.2f} s{_waits(line)}"
        for line in measured.bursts
    ]


def main(arguments: Sequence[str]) -> None:
    """Makes a section of the page from records: the folder of the page, then the records."""
    folder, *paths = map(Path, arguments)
    lines = read(paths)
    made = document("engine", result(lines))
    for line in lines:
        if line["kind"] == "machine":  # this one may have no GPU
            made["machine"] = {key: line[key] for key in made["machine"]}
    print(engine_report.write(folder, paths[-1].stem.removeprefix("engine-"), made))


if __name__ == "__main__":
    main(sys.argv[1:])
