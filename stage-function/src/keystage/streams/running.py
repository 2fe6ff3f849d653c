"""One execution of a module: gather, compute, scatter, and the checks between them.

The local run and the worker both execute modules through this, so that a program which keeps the contract
here keeps it everywhere. It knows one module and one batch; who forms batches is the runtime's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from keystage.streams.api import Message, ProgramError, StreamModule, scattered

Parts: TypeAlias = Sequence[tuple[str, Message]]
"""What one request brings to a module: stream and message; one, or one per input of a join."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request's part of a batch.

    Attributes:
        message: as computed.
        streams: where it goes; empty where it was refused or scattered to nothing.
        refusal: why the request ends here; empty otherwise.
        http_status: what the caller of a refused one sees.
    """

    message: Message
    streams: tuple[str, ...] = ()
    refusal: str = ""
    http_status: int = 500


def run_batch(name: str, module: StreamModule, batch: Sequence[Parts]) -> list[Outcome]:
    """Executes a module once, in inference mode.

    Args:
        name: of the module, for messages.
        module: loaded.
        batch: at most one entry of a request.

    Returns:
        One outcome for each entry, in the same order.

    Raises:
        ProgramError: the module breaks its contract (number or order of messages): all of the batch fail.
        Exception: whatever `gather` or `compute` raise: the same.
    """
    import torch

    order = _in_gathering_order(module, batch)
    requests = [batch[place][0][1].request for place in order]
    with torch.inference_mode():
        gathered = module.gather(_by_stream(module, [batch[place] for place in order]))
        _check(name, "gather", gathered, requests)
        computed = module.compute(gathered)
    _check(name, "compute", computed, requests)
    outcomes = {
        place: _outcome(name, module, message) for place, message in zip(order, computed, strict=True)
    }
    return [outcomes[place] for place in range(len(batch))]


def check_header(name: str, message: Message) -> None:
    """Refuses header fields that cannot travel.

    Raises:
        ProgramError: names the field and its type.
    """
    for key, value in message.header.items():
        if not isinstance(key, str) or not _is_plain(value):
            raise ProgramError(
                f"module {name}: header field {key!r} is {type(value).__name__}; "
                "int, float, str, bool and lists of them travel",
                500,
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(item) in (int, float, str, bool) for item in value)
    return type(value) in (int, float, str, bool)


def _in_gathering_order(module: StreamModule, batch: Sequence[Parts]) -> list[int]:
    """The order in which the default `gather` lists a batch: stream by stream unless it joins."""
    if module.join == "all":
        return list(range(len(batch)))
    rank = {stream.name: number for number, stream in enumerate(module.inputs)}
    return sorted(range(len(batch)), key=lambda place: rank[batch[place][0][0]])


def _by_stream(module: StreamModule, batch: Sequence[Parts]) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = {stream.name: [] for stream in module.inputs}
    for parts in batch:
        for stream, message in parts:
            found[stream].append(message)
    return found


def _check(name: str, what: str, messages: Sequence[Message], requests: Sequence[int]) -> None:
    if len(messages) != len(requests):
        raise ProgramError(f"module {name}: {what} gave {len(messages)} messages for {len(requests)}", 500)
    found = [message.request for message in messages]
    if found != list(requests):
        raise ProgramError(
            f"module {name}: {what} changed requests or their order: {found}, not {list(requests)}", 500
        )


def _outcome(name: str, module: StreamModule, message: Message) -> Outcome:
    """Scatters one message; what is wrong with it ends its request alone."""
    if message.refusal:
        return Outcome(message, (), message.refusal, int(message.header.get("refusal_status", 500)))
    try:
        check_header(name, message)
        streams = tuple(scattered(module, message))
        known = {stream.name for stream in module.outputs}
        for stream in streams:
            if stream not in known:
                raise ProgramError(
                    f"module {name} scattered to stream {stream!r}, it has {', '.join(sorted(known))}", 500
                )
    # The user's own code, for one request: the others of its batch go on.
    except Exception as error:  # noqa: BLE001
        reason = str(error) if isinstance(error, ProgramError) else f"module {name}, scatter: {error!r}"
        return Outcome(message, refusal=reason)
    return Outcome(message, streams)
