"""What of a router's messages goes into its event log. `node` calls it for each that it sends."""

from __future__ import annotations

from keystage.wire import api
from keystage.wire.events import EventLog


def log_sent(events: EventLog, replica: str, message: api.Message) -> None:
    """Writes down sessions that start, move, are handed over or leave, new paths, and dispatched items.

    Args:
        events: the log.
        replica: name of the worker that the message goes to.
        message: what was sent.
    """
    match message:
        case api.Start(specs) | api.Move(specs):
            events.write(
                "start" if isinstance(message, api.Start) else "move",
                replica=replica,
                sessions=[spec.session for spec in specs],
                epochs=[spec.epoch for spec in specs],
                paths=[spec.path for spec in specs],
                tokens=[len(spec.tokens) for spec in specs],
                kept=[spec.kept for spec in specs],
            )
        case api.Hand():
            events.write("hand", replica=replica, session=message.session, stage=message.stage)
        case api.Route():
            events.write("route", path=message.path, replicas=message.replicas, waves=message.waves)
        case api.Release():
            events.write("release", replica=replica, sessions=message.sessions, epochs=message.epochs)
        case api.Work() | api.Fetch() | api.Run():
            events.write("dispatch", replica=replica, stage=message.stage, sessions=message.sessions)
        case _:
            pass
