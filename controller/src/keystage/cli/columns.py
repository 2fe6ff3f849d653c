"""Tables of text that fit a width: columns that matter less are left out, names are cut, no line wraps. Pure.

Used by `status`, `top` and `explain`, which know what is in them (`report_tables`). Lines are rich texts, so
that a caller knows how many there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.text import Text

LEAST_NAME = 8
"""Columns that a name keeps at the least."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: its name.
        rank: 0 is always shown; of the others the highest go first where there is no room.
        is_text: words, to the left and cut where there is no room; else figures, to the right and whole.
        least: columns that words keep at the least.
    """

    title: str
    rank: int = 0
    is_text: bool = False
    least: int = LEAST_NAME


Row = Sequence[Text]


def lines(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[Text]:
    """The header and a line a row, each at most `width` columns wide.

    Args:
        columns: of the table.
        rows: a text for each column.
        width: of the terminal; None: nothing is left out or cut.
    """
    natural = [max([len(c.title), *(row[i].cell_len for row in rows)]) for i, c in enumerate(columns)]
    gap = 2 if width is None or width >= 80 else 1
    shown = _shown(columns, natural, gap, width)
    widths = _widths(columns, natural, shown, gap, width)
    header = [Text(column.title, style="bold") for column in columns]
    made = [_line(columns, row, shown, widths, gap) for row in (header, *rows)]
    for line in made:
        line.rstrip()
    if width is not None:
        for line in made:
            line.truncate(width)
    return made


def _least(column: Column, natural: int) -> int:
    return min(natural, max(column.least, len(column.title))) if column.is_text else natural


def _shown(columns: Sequence[Column], natural: Sequence[int], gap: int, width: int | None) -> list[int]:
    """Places of the columns there is room for."""
    shown = list(range(len(columns)))
    if width is None:
        return shown
    while sum(_least(columns[i], natural[i]) for i in shown) + gap * (len(shown) - 1) > width:
        last = max(shown, key=lambda i: (columns[i].rank, i))
        if columns[last].rank == 0:
            break
        shown.remove(last)
    return shown


def _widths(
    columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int], gap: int, width: int | None
) -> dict[int, int]:
    """Widths of the columns shown: the widest words give way first."""
    widths = {i: natural[i] for i in shown}
    if width is None:
        return widths
    while sum(widths.values()) + gap * (len(shown) - 1) > width:
        can = [i for i in shown if columns[i].is_text and widths[i] > _least(columns[i], natural[i])]
        if not can:
            break
        widths[max(can, key=lambda i: widths[i])] -= 1
    return widths


def _line(
    columns: Sequence[Column], row: Row, shown: Sequence[int], widths: dict[int, int], gap: int
) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for place, i in enumerate(shown):
        cell = row[i].copy()
        cell.truncate(widths[i], overflow="ellipsis")
        room = " " * (widths[i] - cell.cell_len)
        is_last = place == len(shown) - 1
        if columns[i].is_text:
            line.append_text(cell).append("" if is_last else room)
        else:
            line.append(room).append_text(cell)
        line.append("" if is_last else " " * gap)
    return line
