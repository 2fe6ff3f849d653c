"""What the CPU run of `keystage bench engine` has measured; its rows, figures and notes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keystage.bench.engine_client import Together
from keystage.bench.engine_report import TARGETS
from keystage.bench.engine_rival import Generated
from keystage.bench.frame import BenchResult, Figure

MOST_OTHERS_CORES = 0.2
"""Cores that others may use before what was measured is no result."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How ours ran.

    Attributes:
        stages: number of stages.
        threads: compute threads of a worker.
        waves: waves in flight, 0: the router's choice.
    """

    stages: int
    threads: int
    waves: int

    @property
    def words(self) -> str:
        """As the table has it."""
        waves = f"{self.waves} wave" if self.waves else "waves by default"
        return f"Keystage, {_counted(self.stages, 'stage')}, {_counted(self.threads, 'thread')} each, {waves}"


@dataclass(slots=True)
class Rounds:
    """What was measured, one entry a round in each list.

    Attributes:
        tokens: new tokens per request.
        requests: how many at once, where it is more than one.
        cores: of the machine.
        version: of transformers.
        ours: answers by (setting, requests at once). The first setting is the one that counts, the
            defaults; the last in several stages has all cores for every worker.
        rival_alone: `generate`, one prompt.
        rival_batched: `generate`, all prompts as one batch.
        rival_threads: what was best for it, alone and batched.
        others_cores: cores that other programs used meanwhile.
        memory: (private, shared) bytes of each function's process.
        parameter_bytes: of each stage, by function.
    """

    tokens: int
    requests: int
    cores: int
    version: str
    ours: dict[tuple[Setting, int], list[Together]] = field(default_factory=dict)
    rival_alone: list[Generated] = field(default_factory=list)
    rival_batched: list[Generated] = field(default_factory=list)
    rival_threads: tuple[int, int] = (0, 0)
    others_cores: float = 0.0
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    parameter_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, setting: Setting, requests: int, answers: Together) -> None:
        """Adds what one setting did in this round."""
        self.ours.setdefault((setting, requests), []).append(answers)


def result_of(found: Rounds, what: str) -> BenchResult:
    """Makes rows, figures and notes.

    Args:
        found: what was measured.
        what: model, type and prompts, in words.
    """
    rates = {key: [run.tokens_per_s for run in runs] for key, runs in found.ours.items()}
    rival_alone = [found.tokens / run.seconds for run in found.rival_alone]
    rival_batched = [found.requests * found.tokens / run.seconds for run in found.rival_batched]
    default = next(iter(found.ours))[0]
    wide = [setting for setting, _ in found.ours if setting.stages > 1][-1]
    one_stage = next(setting for setting, _ in found.ours if setting.stages == 1)
    rows = [_row(*key, rates[key], found.ours[key]) for key in sorted(rates, key=lambda key: key[1])]
    threads_alone, threads_batched = found.rival_threads
    rows.append(_rival_row(f"transformers generate, {_counted(threads_alone, 'thread')}", 1, rival_alone))
    rows.append(
        _rival_row(
            f"transformers generate, {_counted(threads_batched, 'thread')}", found.requests, rival_batched
        )
    )
    alone, together = rates[default, 1], rates[default, found.requests]
    figures = {
        "cpu_ratio_b1": _ratio("cpu_ratio_b1", alone, rival_alone, "tokens/s of one request / of generate"),
        "cpu_ratio_b8": _ratio(
            "cpu_ratio_b8", together, rival_batched,
            f"tokens/s of {found.requests} requests at once / of generate with one batch of them",
        ),
        "cpu_ratio_b8_sequential": _ratio(
            "cpu_ratio_b8_sequential", together, rival_alone,
            f"tokens/s of {found.requests} requests at once / of generate, one prompt after another",
        ),
        "cpu_vs_own_one_stage_b1": _ratio(
            "cpu_vs_own_one_stage_b1", rates[one_stage, 1], alone,
            f"seconds of one request in {default.stages} stages / in one",
        ),
        "cpu_ratio_b1_all_cores": _ratio(
            "cpu_ratio_b1_all_cores", rates[wide, 1], rival_alone, f"as cpu_ratio_b1; {wide.words}"
        ),
        "cpu_ratio_b8_all_cores": _ratio(
            "cpu_ratio_b8_all_cores", rates[wide, found.requests], rival_batched,
            f"as cpu_ratio_b8; {wide.words}",
        ),
    }  # fmt: skip
    disturbance = ""
    if found.others_cores > MOST_OTHERS_CORES:
        disturbance = f"other programs used {found.others_cores:.1f} of {found.cores} cores meanwhile"
    return BenchResult(rows, figures, _notes(found, what, default), disturbance)


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float], meaning: str) -> Figure:
    return Figure([a / b for a, b in zip(ours, theirs, strict=True)], meaning, TARGETS[name])


def _row(setting: Setting, requests: int, rates: Sequence[float], runs: Sequence[Together]) -> dict[str, Any]:
    answers = [answer for run in runs for answer in run.answers]
    steps = [(answer.total_s - answer.first_s) / (len(answer.ids) - 1) for answer in answers]
    return {
        "system": setting.words,
        "at once": requests,
        "tokens/s": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "ms to first token": 1e3 * statistics.median(answer.first_s for answer in answers),
        "then ms per token": 1e3 * statistics.median(steps),
    }


def _rival_row(words: str, requests: int, rates: Sequence[float]) -> dict[str, Any]:
    return {
        "system": words,
        "at once": requests,
        "tokens/s": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "ms to first token": "",
        "then ms per token": "",
    }


def _notes(found: Rounds, what: str, default: Setting) -> list[str]:
    pairs = [
        (answer.ids, ids)
        for requests, runs in ((1, found.rival_alone), (found.requests, found.rival_batched))
        for ours, theirs in zip(found.ours[default, requests], runs, strict=True)
        for answer, ids in zip(ours.answers, theirs.ids, strict=True)
    ]
    same = sum(ours == theirs for ours, theirs in pairs)
    how = (
        f"{what}, {found.tokens} new tokens each, greedy; tokens/s count prefill on both sides; "
        f"{found.cores} cores for everybody; transformers {found.version}; figures are of the defaults"
    )
    equal = (
        f"{same} of {len(pairs)} greedy answers equal those of transformers token by token (a near-tie may "
        "fall either way: sums run in another order)"
    )
    memory = "; ".join(
        f"{function} {_mib(nbytes)} of parameters, {_mib(found.memory[function][1])} shared and "
        f"{_mib(found.memory[function][0])} private"
        for function, nbytes in found.parameter_bytes.items()
    )
    others = f"other programs used {found.others_cores:.2f} cores meanwhile"
    return [how, equal, f"memory of the workers (interpreter and torch are private): {memory}", others]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
