"""Why a stage has the replicas it has, in words: how it stands, and what was decided from what. Pure.

Before it: `naming` (which stage is meant). After it: `keystage explain`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from keystage.cli import judging
from keystage.cli.figures import clean, duration, named, number, objective, percent, rate
from keystage.cli.keysmanager import span
from keystage.cli.naming import Named
from keystage.observability.api import MOST_DECISIONS, DecisionReport, Report, StageReport

_ORDER = "key-stages"
_ORDINALS = {1: "st", 2: "nd", 3: "rd"}


def decisions(report: Report, meant: Named, last: int) -> tuple[DecisionReport, ...]:
    """The newest decisions about it, the newest last: its own, its pipeline's holds and settled order.

    Args:
        report: of a gateway.
        meant: what is asked about; for a whole pipeline those of all its stages.
        last: how many at the most.
    """
    about = {meant.function}
    if meant.pipeline is not None:
        about.add(meant.pipeline.pipeline)
        if meant.stage is None:
            about |= {stage.function for stage in meant.pipeline.stages}
    return settled(decision for decision in report.decisions if decision.function in about)[-last:]


def settled(found: Iterable[DecisionReport]) -> tuple[DecisionReport, ...]:
    """Decisions without those orders of key stages that the next one replaced.

    Orders change several times a second while little is known; what came of them is the last one.
    """
    made: dict[str, DecisionReport] = {}
    kept: list[DecisionReport] = []
    for decision in found:
        if decision.kind == _ORDER:
            before = made.get(decision.function)
            if before is not None:
                kept.remove(before)
            made[decision.function] = decision
        else:
            made.clear()
        kept.append(decision)
    return tuple(kept)


def faults(meant: Named) -> tuple[judging.Fault, ...]:
    """What is wrong with it."""
    if meant.alone is not None:
        text = judging.of_function(meant.alone)
        return (judging.Fault(clean(meant.function), text),) if text else ()
    if meant.pipeline is None:
        return ()
    found = tuple(judging.of_pipeline(meant.pipeline))
    if meant.stage is None:
        return found
    # What is wrong with the pipeline as a whole concerns each of its stages; what is with another does not.
    own = f"{clean(meant.pipeline.pipeline)}/{meant.stage.stage}"
    return tuple(fault for fault in found if fault.about in (own, clean(meant.pipeline.pipeline)))


def standing(meant: Named) -> Iterator[str]:
    """How it stands now, in lines."""
    if meant.stage is not None and meant.pipeline is not None:
        of = f"stage {meant.stage.stage} of pipeline {clean(meant.pipeline.pipeline)}"
        yield f"{clean(meant.function)}: {of} ({meant.pipeline.execution}){_key(meant.stage)}"
        yield f"replicas: {_replicas(meant.stage)}"
        yield f"load: {_load(meant.stage)}"
        if meant.stage.reason:
            yield f"why this number: {clean(meant.stage.reason)}"
    elif meant.pipeline is not None:
        one = meant.pipeline
        yield f"{clean(one.pipeline)}: pipeline of {len(one.stages)} stages ({one.execution})"
        yield (
            f"load: arrivals {rate(one.arrival_rps)}, latency {duration(one.latency_s)}, "
            f"objective {objective(one)}, met by {percent(one.attainment_ratio)}"
        )
        if one.stages:
            yield f"of one stage: keystage explain {clean(one.pipeline)}/{one.stages[0].stage}"
    elif meant.alone is not None:
        yield f"{clean(meant.function)}: a function that is no stage"
        yield f"replicas: {meant.alone.ready} of {meant.alone.desired} ready, {meant.alone.starting} starting"
        if meant.alone.reason:
            yield f"why this number: {clean(meant.alone.reason)}"


def history(found: tuple[DecisionReport, ...], now_s: float) -> Iterator[str]:
    """The decisions in lines, with what they were made from.

    Args:
        found: see `decisions`.
        now_s: Unix seconds of the controller.
    """
    if not found:
        yield f"no decision about it is among the last {MOST_DECISIONS}"
        return
    yield "last decisions, the newest at the end:"
    for decision in found:
        yield told(decision, now_s)
        if decision.inputs:
            yield "    from " + ", ".join(named(name, value) for name, value in decision.inputs.items())


def told(decision: DecisionReport, now_s: float) -> str:
    """One decision in a line: when, and its words."""
    at = time.strftime("%H:%M:%S", time.localtime(decision.at_s))
    change = f"{clean(decision.function)}: {number(decision.before)} -> {number(decision.after)}"
    return f"{at} ({span(now_s - decision.at_s)} ago) {clean(decision.text) or change}"


def _key(stage: StageReport) -> str:
    if stage.is_key:
        return ", key stage" if stage.rank is None else f", {_ordinal(stage.rank + 1)} key stage"
    return "" if stage.rank is None else f", {_ordinal(stage.rank + 1)} in the ranking, no key stage"


def _ordinal(place: int) -> str:
    end = "th" if 10 <= place % 100 <= 20 else _ORDINALS.get(place % 10, "th")
    return f"{place}{end}"


def _replicas(stage: StageReport) -> str:
    more = [
        f"{count} {word}"
        for count, word in ((stage.starting, "starting"), (stage.draining, "draining"))
        if count
    ]
    return ", ".join([f"{stage.ready} of {stage.desired} ready", *more])


def _load(stage: StageReport) -> str:
    """What was measured; a measure that is missing is left out."""
    parts = [
        ("arrivals", stage.arrival_rps, rate),
        ("CV", stage.arrival_cv, number),
        ("queue", stage.queue, number),
        ("in flight", stage.in_flight, number),
        ("wait", stage.wait_s, duration),
        ("service", stage.service_s, duration),
        ("utilisation", stage.utilisation_ratio, percent),
        ("share of the objective", stage.share_s, duration),
    ]
    return (
        ", ".join(f"{name} {shown(value)}" for name, value, shown in parts if value is not None)
        or "not measured"
    )
