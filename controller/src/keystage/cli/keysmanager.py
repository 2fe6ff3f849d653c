"""`keystage keysmanager` runs a node's daemon; `keystage cache` shows what is in memory where."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.errors import fail
from keystage.cli.output import tell_json
from keystage.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    from rich.console import Console

    from keystage.keysmanager.api import CacheEntry, HistoryEntry, Memory, NodeStatus

ANSWER_S = 10.0
WIDE = 140
"""Columns of a table that goes to a file or a pipe: nothing is cut there."""
SOCKETS = "keysmanager*.sock"
"""In the run folder of a state folder (one a node), or in the state folder itself for a lone daemon."""


def keysmanager() -> None:
    """Run this node's KeysManager (configured by KEYSTAGE_* variables)."""
    from keystage.keysmanager.app import main as run_keysmanager

    raise typer.Exit(run_keysmanager())


def cache(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(help="sockets or http://host:port; default: all nodes of the running `up`"),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="state folder (default .keystage, or KEYSTAGE_HOME)")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="bearer token for http addresses")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """List which key stages are held where, how old they are, and how often they were used."""
    from rich.console import Console

    places = list(nodes or _sockets(home))
    token = _token(token_file)
    found: list[NodeStatus] = []
    failures: list[str] = []
    for place in places:
        try:
            found.append(_status(place, token))
        except OSError as error:
            failures.append(f"{place}: {error}")
    if as_json:
        tell_json({"nodes": found, "failures": failures})
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE)
        for status in found:
            show(status, time.time(), console)
    if failures:
        fail("; ".join(failures), 1)


def show(status: NodeStatus, now_s: float, console: Console) -> None:
    """Prints one node.

    Args:
        status: what it says.
        now_s: Unix seconds, for ages.
        console: where to.
    """
    from rich.table import Table

    console.print(f"[bold]{status.node}[/]: {_memory(status.memory)}")
    table = Table(expand=False)
    for title in ("rank", "stage", "parameters", "state", "size", "from", "age", "used", "uses", "claims"):
        table.add_column(title, justify="right" if title in ("rank", "size", "uses", "claims") else "left")
    for holder in status.holders:
        table.add_row(*_row(holder, now_s))
    kept = {(holder.identity, holder.stage) for holder in status.holders}
    for entry in status.history:
        if (entry.identity, entry.name.stage) not in kept:
            table.add_row(*_past(entry, now_s))
    if table.row_count:
        console.print(table)
    else:
        console.print("  nothing is held")
    for standby in status.standbys:
        state = f"{standby.state} {span(now_s - standby.since_s)}: {standby.shape}"
        ahead = f", {len(standby.registered)} registered ahead" if standby.registered else ""
        console.print(f"  standby {standby.pid or '-'} {state}{ahead}{standby.note and f' ({standby.note})'}")
    for gpu in status.gpus:
        console.print(f"  GPU {gpu.index} {gpu.name}: {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free")
    if status.gpu_reason:
        console.print(f"  {status.gpu_reason}")


def _memory(memory: Memory) -> str:
    return (
        f"{size(memory.used_bytes)} of a budget of {size(memory.budget_bytes)} in use "
        f"({size(memory.segment_bytes)} by segments; limit {size(memory.limit_bytes)}, {memory.origin})"
    )


def _row(holder: CacheEntry, now_s: float) -> Sequence[str]:
    from rich.markup import escape

    state = f"{holder.state}: {holder.reason}" if holder.reason else holder.state
    return (
        "" if holder.rank is None else str(holder.rank),
        escape(f"{holder.pipeline}/{holder.stage}"),
        holder.identity[:12],
        escape(state),
        size(holder.nbytes),
        f"{holder.source}, {holder.load_s:.2f} s" if holder.loaded_at_s else "",
        span(now_s - holder.loaded_at_s) if holder.loaded_at_s else "",
        f"{span(now_s - holder.used_at_s)} ago" if holder.used_at_s else "never",
        str(holder.uses),
        str(holder.claims),
    )


def _past(entry: HistoryEntry, now_s: float) -> Sequence[str]:
    from rich.markup import escape

    stage = escape(f"{entry.name.bundle.rstrip('/').rpartition('/')[2]}/{entry.name.stage}")
    state = "not held" if entry.is_valid else "revoked"
    ago = f"{span(now_s - entry.at_s)} ago"
    return ("", stage, entry.identity[:12], state, "", "", "", ago, str(entry.uses), "")


def size(nbytes: int) -> str:
    """Bytes for people."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    return f"{nbytes / (1 << 20):.1f} MiB"


def span(seconds: float) -> str:
    """A length of time for people: the two largest units."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for name, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length or (name == "s" and not parts):
            parts.append(f"{left // length} {name}")
            left %= length
        elif parts:
            break
    return " ".join(parts[:2])


def _sockets(home: Path | None) -> list[str]:
    """Sockets of the nodes of a running `up`, and of a daemon that was started alone."""
    from keystage.local.config import LocalSettings
    from keystage.local.errors import LocalError
    from keystage.local.home import control_socket

    folder = home or LocalSettings().home
    found = sorted(str(path) for path in folder.glob(SOCKETS))
    try:
        found += sorted(str(path) for path in control_socket(folder).parent.glob(SOCKETS))
    except LocalError as error:
        if not found:
            fail(error, 1)
    if not found:
        fail(f"no KeysManager runs on state folder {folder}", 1)
    return found


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    from keystage.keysmanager.config import read_token

    try:
        return read_token(path)
    except ValueError as error:
        fail(error, 2)


def _status(place: str, token: str) -> NodeStatus:
    """Asks one node.

    Raises:
        OSError: it cannot be reached, or says no.
    """
    from keystage.keysmanager.client import KeysManagerClient, KeysManagerError

    if not place.startswith(("http://", "https://")):
        try:
            return asyncio.run(KeysManagerClient(place).status())
        except KeysManagerError as error:
            raise OSError(str(error)) from error
    return _status_over_http(place, token)


def _status_over_http(address: str, token: str) -> NodeStatus:
    import msgspec

    from keystage.keysmanager.api import NodeStatus

    url = f"{address.rstrip('/')}/v1/status"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310  # checked above
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            return msgspec.json.decode(answer.read(), type=NodeStatus)
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{error.code} {error.read(200).decode(errors='replace')}") from error
    except UNREADABLE as error:
        raise OSError(f"no status of a KeysManager: {error}") from error
