"""What a run showed: `lost N wrong N duplicated N late N`, and a line a class of faults. Pure.

Before it: verdicts, hits and what the logs prove. After it: text for people, a document for `out/chaos.json`,
and whether the run has failed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from chaos.checker import FAILING, Answer, Judged, Verdict, judge
from chaos.proof import Found, Hit
from chaos.requests import Request

AFTER_S = 2.0
"""A request that begins so soon after a fault is over counts as disturbed by it."""
TOLD = 20
"""Failed requests told in words."""
WIDTHS = ("<17", ">5", ">5", ">6", ">9", ">9", ">7", ">7", ">11", ">7", ">7")
LEGEND = """\
done: struck; mid: while sessions were held (by the victims, where these are workers), by the routers' event
logs; held: these sessions; noticed: s until the router gave a worker up, p50; requests: in flight while it
struck or lasted, and their latency in s; pause: of streams, s until the next token"""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Everything known after a run.

    Attributes:
        seed: of it.
        kinds: classes of faults asked for.
        least: times that each had to be reached in mid-request.
        asked: requests and answers.
        hits: faults.
        found: what the logs say of each.
        notes: what else is to be told: classes left out and why, processes left over.
        faults: sentences that make the run fail by themselves.
    """

    seed: int
    kinds: tuple[str, ...]
    least: int
    asked: Sequence[tuple[Request, Answer]]
    hits: Sequence[Hit]
    found: Sequence[Found]
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def reached(hits: Sequence[Hit], found: Sequence[Found]) -> Counter[str]:
    """How often each class struck in mid-request."""
    return Counter(hit.kind for hit, one in zip(hits, found, strict=True) if one.held)


def document(run: Run) -> dict[str, Any]:
    """The report as data."""
    judged = [judge(request, answer) for request, answer in run.asked]
    counts = Counter(one.verdict for one in judged)
    by_class = _reached_rows(run)
    short = [row["class"] for row in by_class if row["mid_request"] < run.least]
    faults = [f"{counts[verdict]} requests {verdict}" for verdict in FAILING if counts[verdict]]
    faults += [
        f"{row['class']} struck {row['mid_request']} times in mid-request, {run.least} were asked for"
        for row in by_class
        if row["class"] in short
    ]
    answers = [answer for _, answer in run.asked]
    return {
        "seed": run.seed,
        "requests": len(run.asked),
        "right": counts["right"],
        **{verdict: counts[verdict] for verdict in (*FAILING, "late", "refused")},
        "refusals": dict(Counter(a.refused for a in answers if a.refused)),
        "reconnected": sum(bool(a.breaks_s) for a in answers),
        "resumed": sum(bool(a.resumed) for a in answers),
        "tokens": sum(len(a.tokens) for a in answers),
        "classes": by_class,
        "undisturbed": _latency(_undisturbed(run)),
        "failed": _told(run, judged, FAILING),
        "late_ones": _told(run, judged, ("late",)),
        "hits": [
            {**dataclasses.asdict(hit), **dataclasses.asdict(one)}
            for hit, one in zip(run.hits, run.found, strict=True)
        ],
        "notes": list(run.notes),
        "faults": [*faults, *run.faults],
    }


def text(told: dict[str, Any]) -> str:
    """The document in words; the last line is the one that counts."""
    told_of = (
        f"seed {told['seed']}: {told['requests']} requests, {told['tokens']} tokens, {told['right']} right, "
        f"{told['refused']} refused {told['refusals'] or ''}; {told['reconnected']} reconnected, "
        f"{told['resumed']} resumed in mid-stream"
    )
    heads = ("class", "done", "mid", "held", "noticed", "requests", "p50", "p99", "pause p50", "p99", "most")
    lines = [told_of, f"undisturbed requests: {_said(told['undisturbed'])}", "", _row(heads)]
    for row in told["classes"]:
        seen, pause = row["latency"], row["pause"]
        seconds = (seen["p50_s"], seen["p99_s"], pause["p50_s"], pause["p99_s"], pause["most_s"])
        counts = (row["class"], row["done"], row["mid_request"], row["held"])
        lines.append(_row((*counts, _number(row["noticed_p50_s"]), seen["count"], *map(_number, seconds))))
    lines.append(LEGEND)
    lines += [f"note: {note}" for note in told["notes"]]
    lines += [f"request {one['number']} {one['verdict']}: {one['reason']}" for one in told["failed"][:TOLD]]
    lines += [f"FAILED: {fault}" for fault in told["faults"]]
    lines.append(" ".join(f"{name} {told[name]}" for name in (*FAILING, "late")))
    return "\n".join(lines)


def _row(cells: Sequence[object]) -> str:
    return "".join(f"{cell!s:{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _reached_rows(run: Run) -> list[dict[str, Any]]:
    rows = []
    for kind in run.kinds:
        pairs = [(h, f) for h, f in zip(run.hits, run.found, strict=True) if h.kind == kind]
        noticed = [f.noticed_s for _, f in pairs if f.noticed_s is not None]
        touched = [a for _, a in run.asked if any(_touches(a, h) for h, _ in pairs)]
        pauses = [p for a in touched for h, _ in pairs if (p := a.pause_s(h.at_s)) is not None]
        rows.append(
            {
                "class": kind,
                "done": len(pairs),
                "mid_request": sum(bool(f.held) for _, f in pairs),
                "held": sum(f.held for _, f in pairs),
                "noticed_p50_s": _quantile(noticed, 50),
                "noticed_most_s": max(noticed, default=None),
                "latency": _latency(touched),
                "pause": {
                    "count": len(pauses),
                    "p50_s": _quantile(pauses, 50),
                    "p99_s": _quantile(pauses, 99),
                    "most_s": max(pauses, default=None),
                },
            }
        )
    return rows


def _touches(answer: Answer, hit: Hit) -> bool:
    """Whether a request was in flight while a fault struck or lasted."""
    return answer.begun_s <= hit.until_s and (not answer.ended_s or answer.ended_s >= hit.at_s)


def _undisturbed(run: Run) -> list[Answer]:
    spans = [(hit.at_s, hit.until_s + AFTER_S) for hit in run.hits]
    return [
        answer
        for _, answer in run.asked
        if answer.ended_s and not any(answer.begun_s <= until and answer.ended_s >= at for at, until in spans)
    ]


def _latency(answers: Sequence[Answer]) -> dict[str, Any]:
    taken = [a.taken_s for a in answers if a.ended_s]
    return {"count": len(taken), "p50_s": _quantile(taken, 50), "p99_s": _quantile(taken, 99)}


def _told(run: Run, judged: Sequence[Judged], verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Requests with these verdicts, with what is needed to look into them."""
    return [
        {
            "number": request.number,
            "key": request.key,
            "verdict": one.verdict,
            "reason": one.reason,
            "streamed": request.is_streamed,
            "case": dataclasses.asdict(request.case),
            "answer": dataclasses.asdict(answer),
            "beside": [hit.kind for hit in run.hits if _touches(answer, hit)],
        }
        for (request, answer), one in zip(run.asked, judged, strict=True)
        if one.verdict in verdicts
    ]


def _quantile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _said(seen: dict[str, Any]) -> str:
    return f"{seen['count']}, p50 {_number(seen['p50_s'])} s, p99 {_number(seen['p99_s'])} s"
