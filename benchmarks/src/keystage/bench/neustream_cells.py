"""What `bench neustream` runs: loads, systems and their settings, each run a value that a process performs.

Before it: `neustream`, which picks cells and seeds. After it: scores. The loads are the paper's where it
prints them: Figure 11 (diffusion), 14 (OPT-13B on an A6000), 17 (three agents on RTX 4090s).
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from keystage.bench import neustream_diffusion as diffusion
from keystage.bench import neustream_language as language
from keystage.bench.neustream_models import CODE_LLAMA, DIFFUSION, LLAVA, OPT_13B, Language
from keystage.bench.neustream_shares import DEVICE_SPUS, Effort, our_parts, prefill_first_parts
from keystage.streams.interpolate import economical_batch

OURS = "keystage"
CLOCKWORK = "clockwork"
PADDED = "padded"
PREFILL_FIRST = "prefill-first"
UNTUNED = "prefill-first, untuned"
"""At most 256 sessions and 8,192 tokens of a prefill: as the paper's evaluation runs vLLM."""

CHAT = language.Lengths(127, 0.85, (50, 300), 0.75)
"""Prompts of the artifact's 100 conversations (mean 127 tokens, CV 0.85); answers end at 300 as there, and
an assumption of ours is that a quarter end before, evenly from 50 tokens on."""
PLOT = language.Lengths(700, 0.5, (150, 700), 0.25)
"""Agents that write plotting code: an assumption, prompts of 700 tokens in the mean and answers of 494, such
that an engine on an RTX 4090 is full at about the 1 request a second at which the paper finds it full."""

PARTS = ("sd", "xl", "s2", "opt", "own", "shared")
_DIFFUSION = dict(zip(PARTS[:3], DIFFUSION, strict=True))
_AGENTS: dict[str, tuple[list[tuple[Language, language.Lengths]], list[int]]] = {
    "opt": ([(OPT_13B, CHAT)], [0]),
    "own": ([(CODE_LLAMA, PLOT), (LLAVA, PLOT), (CODE_LLAMA, PLOT)], [0, 1, 2]),
    "shared": ([(CODE_LLAMA, PLOT), (LLAVA, PLOT), (CODE_LLAMA, PLOT)], [0, 0, 0]),
}
FIRST_SCALES = {"opt": 3.0, "own": 2.0, "shared": 2.0}
"""Objective of the first token, as the artifact's experiments set it."""
TITLES = {
    "sd": "Stable Diffusion",
    "xl": "DiT-XL/2",
    "s2": "DiT-S/2",
    "opt": "OPT-13B",
    "own": "three agents, a GPU each",
    "shared": "three agents on one GPU",
}

_STEP_RATIO = 0.95
"""Of the objective's share of a step, as the paper's implementation has it."""
Setting = tuple[float, float]
SETTINGS: dict[str, dict[str, tuple[Setting, ...]]] = {
    part: {
        # Throughput of a step's batch that is enough, of the best within its partial SLO; speed a newcomer is
        # reckoned with: 0 that of a batch of one, 1 of the limit.
        OURS: tuple(itertools.product((0.8, 0.9, 1.0), (0.0, 0.5, 1.0))),
        # Largest batch; share of the objective kept in hand.
        CLOCKWORK: tuple(itertools.product((2.0, 4.0, 10.0), (0.0, 0.02, 0.05))),
        PADDED: tuple(itertools.product((3.0, 6.0, 10.0), (0.0, 0.02, 0.05))),
    }
    for part in PARTS[:3]
} | {
    part: {
        # See `neustream_shares.Effort`.
        OURS: tuple(itertools.product((0.1, 0.3, 0.6, 1.0), (0.95, 1.0))),
        # Most sessions at a time; most tokens of a prefill.
        PREFILL_FIRST: tuple(itertools.product((24.0, 48.0, 96.0, 256.0), (2048.0, 8192.0))),
        UNTUNED: ((256.0, 8192.0),),
    }
    for part in PARTS[3:]
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One load of one part.

    Attributes:
        part: of `PARTS`.
        rate_rps: mean arrival rate.
        cv: of the gaps.
        scale: of the request's time alone, or of a token's.
        is_fixed: every request has the mean number of steps.
    """

    part: str
    rate_rps: float
    cv: float
    scale: float
    is_fixed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A cell under a system."""

    cell: Cell
    system: str
    setting: Setting
    requests: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """What a run found.

    Attributes:
        run: which.
        offered: requests that count.
        good: in time, at every agent where there are several.
        strict: with the first tokens in time as well; `good` where there are none.
        each: share of good requests of each agent, as the paper counts them.
        batch: mean size of the batches that repeat: steps, decodes, or whole requests.
        cpu_s: processor seconds that it took.
    """

    run: Run
    offered: int
    good: int
    strict: int
    each: tuple[float, ...]
    batch: float
    cpu_s: float


def perform(run: Run) -> Score:
    """Performs a run; in any process."""
    begun_s = time.process_time()
    if run.cell.part in _DIFFUSION:
        return _diffusion(run, begun_s)
    return _language(run, begun_s)


def _diffusion(run: Run, begun_s: float) -> Score:
    cell, (first, second) = run.cell, run.setting
    model = _DIFFUSION[cell.part]
    load = diffusion.Load(cell.rate_rps, cell.cv, cell.scale, run.requests, run.seed, cell.is_fixed)
    if run.system == OURS:
        partial_s = _STEP_RATIO * cell.scale * model.step.latency_s(1)
        limit = max(1, economical_batch(model.step, partial_s, first))
        admit = max(1, round(1 + second * (limit - 1)))
        found = diffusion.modules(model, load, diffusion.Effort(limit, admit))
    else:
        serve = diffusion.clockwork if run.system == CLOCKWORK else diffusion.padded
        found = serve(model, load, int(first), second)
    cpu_s = time.process_time() - begun_s
    each = (found.good / found.offered,)
    return Score(run, found.offered, found.good, found.good, each, found.mean_batch, cpu_s)


def _language(run: Run, begun_s: float) -> Score:
    cell, (first, second) = run.cell, run.setting
    agents, devices = _AGENTS[cell.part]
    load = language.Load(cell.rate_rps, cell.cv, FIRST_SCALES[cell.part], cell.scale, run.requests, run.seed)
    if run.system == OURS:
        parts = our_parts(agents, load, Effort(first, second), devices)
    else:
        parts = prefill_first_parts(agents, int(first), int(second), devices)
    served = language.serve(parts, [DEVICE_SPUS] * (max(devices) + 1), load)
    tallies = served.tallies
    return Score(
        run,
        tallies[0].offered,
        served.good,
        served.strict,
        tuple(tally.good / tally.offered for tally in tallies),
        sum(tally.mean_batch for tally in tallies) / len(tallies),
        time.process_time() - begun_s,
    )


_LANGUAGE: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "opt": ((1.0, 1.5, 2.0, 2.5, 3.0, 4.0), (1.2, 1.4, 1.6, 2.0)),
    "own": ((0.4, 0.6, 0.8, 1.0, 1.2), (1.2, 1.4, 1.6, 2.0)),
    "shared": ((0.15, 0.25, 0.35, 0.5), (4.0, 5.0, 6.0)),
}
"""Rates and objectives of each language part."""


def base(part: str) -> Cell:
    """The load around which the others vary one thing."""
    if part in _DIFFUSION:
        return Cell(part, _DIFFUSION[part].rate_rps, 2.0, 3.0)
    if part == "opt":
        return Cell(part, 2.0, 1.0, 1.5)
    return Cell(part, 0.6, 1.0, 2.0) if part == "own" else Cell(part, 0.25, 1.0, 5.0)


def cells(part: str, *, full: bool) -> list[Cell]:
    """All loads of a part, each once."""
    usual = base(part)
    cvs: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0) if full else (1.0, 2.0, 4.0)
    if part in _DIFFUSION:
        model = _DIFFUSION[part]
        rates = model.rates_rps
        scales = (1.05, *model.scales) if full else model.scales[::2]
        extra = [
            dataclasses.replace(usual, cv=4.0, scale=model.scales[0]),
            dataclasses.replace(usual, is_fixed=True),
        ]
    else:
        rates, scales = _LANGUAGE[part]
        extra = []
        cvs = (2.0,) if part == "shared" and not full else cvs[:4]
    found = [dataclasses.replace(usual, rate_rps=rate) for rate in rates]
    found += [dataclasses.replace(usual, cv=cv) for cv in cvs]
    found += [dataclasses.replace(usual, scale=scale) for scale in scales]
    return list(dict.fromkeys([*found, *extra]))


def quick_cells(part: str) -> list[Cell]:
    """A look: a high rate, CV 4, a tight objective."""
    usual = base(part)
    every = cells(part, full=False)
    rate = max(cell.rate_rps for cell in every)
    scale = min(cell.scale for cell in every)
    found = [
        usual,
        dataclasses.replace(usual, rate_rps=rate),
        dataclasses.replace(usual, cv=4.0),
        dataclasses.replace(usual, scale=scale),
    ]
    return found[:2] if part == "shared" else found


def perform_all(runs: Sequence[Run], processes: int, what: str) -> list[Score]:
    """Performs runs in so many processes, the long ones first; answers in the given order."""
    order = sorted(range(len(runs)), key=lambda i: -runs[i].requests)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        done = _told(pool.map(perform, [runs[i] for i in order], chunksize=2), len(runs), what)
    by_place = dict(zip(order, done, strict=True))
    return [by_place[i] for i in range(len(runs))]


def _told(scores: Iterable[Score], total: int, what: str) -> list[Score]:
    begun_s = told_s = time.monotonic()
    kept: list[Score] = []
    for score in scores:
        kept.append(score)
        if time.monotonic() - told_s >= 20:
            told_s = time.monotonic()
            print(f"{what}: {len(kept)} of {total} runs, {told_s - begun_s:.0f} s", file=sys.stderr)
    return kept
