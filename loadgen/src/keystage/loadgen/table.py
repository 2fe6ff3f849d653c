"""Shows a report as tables in the terminal. Comes last; `sheets` says what is in them."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keystage.loadgen.report import Report
from keystage.loadgen.sheets import Sheet, printable, sheets

_TEXTS = ("class", "first of them", "verdict")
"""Columns of words; the others are figures and stand to the right."""


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """The report as something rich can print."""
    parts: list[RenderableType] = [rendered(sheet) for sheet in sheets(report)]
    parts.extend(Text(f"note: {printable(note)}", style="yellow") for note in report.notes)
    if not report.valid:
        told = "; ".join(report.invalid_because)
        parts.append(Text(f"INVALID: {printable(told)}", style="bold red"))
    return Group(*parts)


def rendered(sheet: Sheet) -> Table:
    """One sheet as something rich can print."""
    table = Table(
        title=Text(sheet.title, style="table.title"),
        title_justify="left",
        caption=Text(sheet.caption, style="table.caption") if sheet.caption else None,
        caption_justify="left",
        show_header=bool(sheet.header),
    )
    if not sheet.header:
        table.add_column(style="bold")
        table.add_column()
    for place, name in enumerate(sheet.header):
        is_text = name in _TEXTS or (place == 0 and name in ("", "by"))
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
