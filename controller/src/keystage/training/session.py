"""One training from seeds to tested weights: what `keystage train-cv` does, without its words.

Before it: options. After it: weights with metrics, rows of the error table, and one chain per entry CV
to look at. Seeds are split over processes; the result does not depend on how many.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from keystage.controller.maths.attention import Attention, Metrics, Weights
from keystage.training import dataset, recorded
from keystage.training.dataset import TEST_CVS, Example
from keystage.training.fit import FitOptions, fit
from keystage.training.report import Row, compare

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train on and how.

    Attributes:
        seeds: chains to train on, one per seed.
        first_seed: the first of them.
        held_out: chains per entry CV to test on; their seeds follow a stream of their own.
        recorded: decisions logs whose windows are learned from as well.
        epochs: passes over the examples.
        workers: processes that simulate.
        scale: factor on arrivals per run; below 1 for a look only.
    """

    seeds: int = 800
    first_seed: int = 1
    held_out: int = 12
    recorded: tuple[Path, ...] = ()
    epochs: int = 250
    workers: int = 2
    scale: float = 1.0

    def check(self) -> None:
        """Refuses what makes no sense.

        Raises:
            ValueError: names the option, its bound and the value.
        """
        for name, value, low, high in (
            ("seeds", self.seeds, 16, 100_000),
            ("first seed", self.first_seed, 0, 1 << 30),
            ("held-out chains per CV", self.held_out, 2, 10_000),
            ("epochs", self.epochs, 1, 100_000),
            ("workers", self.workers, 1, 256),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} must be in {low}..{high}, got {value}")
        if not 0 < self.scale <= 100:
            raise ValueError(f"scale of the runs must be above 0 and at most 100, got {self.scale}")


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """What came out.

    Attributes:
        weights: with metrics.
        rows: error table on the held-out chains.
        shown: one held-out chain per entry CV.
        recorded: examples that came from recorded runs.
    """

    weights: Weights
    rows: list[Row]
    shown: list[Example]
    recorded: int


def train(options: TrainOptions, progress: Progress | None = None) -> Trained:
    """Simulates, learns, tests.

    Raises:
        ValueError: an option makes no sense, or a recorded run cannot be read.
        OSError: a recorded run is not there.
    """
    options.check()
    tell = progress or _quiet
    lived = [example for path in options.recorded for example in recorded.read(path)]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    learned = _simulated(
        [(seed, None) for seed in seeds], options, functools.partial(tell, "simulating chains to learn from")
    )
    tested = held_out(options.held_out, options, functools.partial(tell, "simulating chains to test on"))
    version = f"{options.seeds}-{options.first_seed}-{options.epochs}"
    weights = fit(
        [*learned, *lived],
        FitOptions(epochs=options.epochs, seed=options.first_seed),
        version,
        lambda epoch, loss: tell(f"learning, loss {loss:.4f}", epoch, options.epochs),
    )
    rows = compare(tested, Attention(weights))
    by_name = {row.name: row.all for row in rows}
    metrics = Metrics(
        chains=len(learned) + len(lived),
        held_out=len(tested),
        guess=round(by_name["same as upstream"], 4),
        qna=round(by_name["qna"], 4),
        attention=round(by_name["attention"], 4),
    )
    shown = [next(e for e in tested if e.entry_cv == cv) for cv in TEST_CVS]
    return Trained(msgspec.structs.replace(weights, metrics=metrics), rows, shown, len(lived))


def held_out(
    count: int, options: TrainOptions, progress: Callable[[int, int], None] | None = None
) -> list[Example]:
    """Chains to test on: `count` for each of the entry CVs of the comparison."""
    jobs: list[tuple[int, float | None]] = [
        (1000 * i + number, cv) for i, cv in enumerate(TEST_CVS, start=1) for number in range(count)
    ]
    return _simulated(jobs, options, progress or (lambda done, total: None))


def _simulated(
    jobs: Sequence[tuple[int, float | None]], options: TrainOptions, progress: Callable[[int, int], None]
) -> list[Example]:
    """Examples in the order of the jobs (seed, and the entry CV of a test)."""
    work = functools.partial(_example, scale=options.scale)
    found: list[Example] = []
    if options.workers == 1:
        for job in jobs:
            found.append(work(job))
            progress(len(found), len(jobs))
        return found
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for example in pool.imap(work, jobs, chunksize=4):
            found.append(example)
            progress(len(found), len(jobs))
    return found


def _example(job: tuple[int, float | None], scale: float) -> Example:
    seed, cv = job
    if cv is None:
        return dataset.training_example(seed, scale)
    return dataset.held_out_example(seed, cv, scale)


def _quiet(what: str, done: int, total: int) -> None:
    """Tells nobody."""
