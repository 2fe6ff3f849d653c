"""What `keystage top` shows, and what its keys do. Pure: a report, a view and a size in, lines out.

Every screen fits: at most as many lines as the terminal has, none wider than it, from 40 columns and 10 lines
on. What has least to say of the present trouble goes first.
"""

from __future__ import annotations

import dataclasses

from rich.text import Text

from keystage.cli import judging
from keystage.cli import report_tables as tables
from keystage.cli.columns import lines
from keystage.cli.explaining import settled, told
from keystage.cli.figures import clean
from keystage.observability.api import STALE_S, PipelineReport, Report
from keystage.observability.words import counted

LEAST_PIPELINES = 3
MOST_DECISIONS = 8
MOST_NODES = 4
TALL = 30
"""Lines of a terminal from which nodes are shown."""
KEYS = "q quit  p pause  j/k pipeline  PgUp/PgDn stages"


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What a person chose.

    Attributes:
        chosen: name of the pipeline whose stages are shown, empty: the first.
        first: place of the first stage shown.
        page: stages that the last screen had room for.
        is_paused: the report stays as it is.
        is_ended: the person has had enough.
    """

    chosen: str = ""
    first: int = 0
    page: int = 1
    is_paused: bool = False
    is_ended: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a gateway.

    Attributes:
        report: the newest that came.
        age_s: since when it has not changed.
        error: why the last exchange brought none, empty where it did.
    """

    report: Report
    age_s: float = 0.0
    error: str = ""


def pressed(view: View, key: str, report: Report) -> View:
    """The view after a key; one that means nothing changes nothing."""
    match key:
        case "q" | "Q" | "end":
            return dataclasses.replace(view, is_ended=True)
        case "p" | " ":
            return dataclasses.replace(view, is_paused=not view.is_paused)
        case "j" | "down" | "k" | "up":
            names = [pipeline.pipeline for pipeline in report.pipelines]
            if not names:
                return view
            place = _place(view, report) + (1 if key in ("j", "down") else -1)
            return dataclasses.replace(view, chosen=names[min(max(place, 0), len(names) - 1)], first=0)
        case "page-down" | "page-up":
            if not report.pipelines:
                return view
            count = len(report.pipelines[_place(view, report)].stages)
            first = view.first + (view.page if key == "page-down" else -view.page)
            return dataclasses.replace(view, first=max(0, min(first, count - view.page)))
    return view


def screen(
    view: View, seen: Seen, width: int, height: int, *, is_plain: bool = False
) -> tuple[list[Text], View]:
    """The lines of the whole screen, and the view with what it had room for.

    Args:
        view: what a person chose.
        seen: what is known.
        width: columns of the terminal.
        height: its lines.
        is_plain: ASCII alone.
    """
    report = seen.report
    made = _head(view, seen)
    left = height - len(made) - 1  # the last line tells the keys
    shown = _pipelines(view, report, width, max(LEAST_PIPELINES, left // 4)) if report.pipelines else []
    if not report.pipelines:
        shown = [Text("no pipeline is deployed", style="yellow"), *_functions(report, width, left - 1)]
    made += shown[: max(left, 0)]
    left -= len(shown)
    if report.pipelines and left >= 3:
        one = report.pipelines[_place(view, report)]
        nodes = _nodes(report, width) if height >= TALL else []
        least = min(MOST_DECISIONS + 1, left // 3) + len(nodes)
        page = max(1, min(len(one.stages), left - least - 2))
        view = dataclasses.replace(view, first=max(0, min(view.first, len(one.stages) - page)), page=page)
        stages = _stages(view, one, width, is_plain=is_plain)
        made += stages
        left -= len(stages)
        log = _decisions(one, report, min(MOST_DECISIONS + 1, left - len(nodes)))
        made += [*log, *nodes][: max(left, 0)]
    made = [*made[: max(height - 1, 0)], Text(KEYS, style="reverse", no_wrap=True)]
    for line in made:
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width)
    return made[:height], view


def _place(view: View, report: Report) -> int:
    """Place of the chosen pipeline; one that is gone is the first."""
    names = [pipeline.pipeline for pipeline in report.pipelines]
    return names.index(view.chosen) if view.chosen in names else 0


def _head(view: View, seen: Seen) -> list[Text]:
    report = seen.report
    version = f" {clean(report.version)}" if report.version else ""
    head = Text(f"Keystage{version}", style="bold")
    if view.is_paused:
        head.append("  PAUSED", style="bold yellow")
    head.append(
        f"  {counted(len(report.pipelines), 'pipeline')}, {counted(len(report.nodes), 'node')}",
        style="not bold",
    )
    made = [head]
    if seen.error:
        made.append(Text(f"no answer: {clean(seen.error)}", style="bold red"))
    elif seen.age_s > STALE_S and not view.is_paused:
        made.append(
            Text(
                f"the report has not changed for {seen.age_s:.0f} s: is the controller gone?",
                style="bold red",
            )
        )
    if report.trouble:
        made.append(Text(clean(report.trouble), style="bold red"))
    return made


def _pipelines(view: View, report: Report, width: int, most: int) -> list[Text]:
    """The table of pipelines, around the chosen one."""
    place = _place(view, report)
    first = max(0, min(place - most // 2, len(report.pipelines) - most))
    shown = report.pipelines[first : first + most]
    made = lines(tables.PIPELINES, [tables.pipeline_row(one) for one in shown], width - 2)
    marked = [Text("  ").append_text(made[0])]
    for offset, line in enumerate(made[1:]):
        marked.append(Text("> " if first + offset == place else "  ").append_text(line))
    if len(shown) < len(report.pipelines):
        marked.append(Text(f"  {len(report.pipelines) - len(shown)} more (j/k)", style="dim"))
    return marked


def _functions(report: Report, width: int, most: int) -> list[Text]:
    """The table of functions, as far as there is room: without pipelines they are all there is."""
    if not report.functions or most < 2:
        return []
    shown = report.functions[: most - 1]
    if len(shown) < len(report.functions):
        shown = shown[:-1]
    made = lines(tables.FUNCTIONS, [tables.function_row(one) for one in shown], width)
    if len(shown) < len(report.functions):
        made.append(Text(f"{len(report.functions) - len(shown)} more: keystage status", style="dim"))
    return made


def _stages(view: View, one: PipelineReport, width: int, *, is_plain: bool) -> list[Text]:
    """A title and the table of the stages that there is room for."""
    shown = one.stages[view.first : view.first + view.page]
    longest = tables.longest_queue(one.stages)
    rows = [tables.stage_row(stage, longest, is_plain=is_plain) for stage in shown]
    title = Text(clean(one.pipeline), style="bold")
    if len(shown) < len(one.stages):
        title.append(f" stages {view.first}-{view.first + len(shown) - 1} of {len(one.stages)}", style="dim")
    keys = tables.key_stages(one)
    if keys:
        title.append(f" key: {keys}", style="magenta")
    wrong = [str(fault) for fault in judging.of_pipeline(one)]
    if wrong:
        title.append(f"  {wrong[0]}", style="red")
    return [title, *lines(tables.STAGES, rows, width)]


def _decisions(one: PipelineReport, report: Report, most: int) -> list[Text]:
    """The newest decisions about the pipeline, the newest first."""
    about = {one.pipeline, *(stage.function for stage in one.stages)}
    found = settled(decision for decision in report.decisions if decision.function in about)
    if most < 2 or not found:
        return []
    newest = list(reversed(found))[: most - 1]
    return [Text("decisions, the newest first", style="bold"), *(Text(told(d, report.at_s)) for d in newest)]


def _nodes(report: Report, width: int) -> list[Text]:
    if not report.nodes:
        return []
    shown = report.nodes[:MOST_NODES]
    made = lines(tables.NODES, [tables.node_row(node) for node in shown], width)
    if len(shown) < len(report.nodes):
        made.append(Text(f"{len(report.nodes) - len(shown)} more nodes", style="dim"))
    return made
