"""Whether a worker that introduces itself is one for this router. Used by `node`; changes nothing.

Before it: `node` has a `Hello`. After it: the fleet takes the worker, or `turned_away` remembers why not.
"""

from __future__ import annotations

from keystage.bundle.api import Pipeline
from keystage.wire import api
from keystage.wire.mailbox import Mailbox
from keystage.wire.versions import common, differ, spoken


def speaks_otherwise(hello: api.Hello) -> str | None:
    """Why nothing can be said to a worker, None where it can."""
    theirs = spoken(hello.wire, hello.newest)
    if common(api.VERSIONS, theirs) is not None:
        return None
    return differ(hello.replica, theirs, "this router", api.VERSIONS)


def unfit(mailbox: Mailbox, pipeline: Pipeline, sender: str, hello: api.Hello) -> str | None:
    """Why a worker is none for this router: not to be reached, or of another bundle; None where it is."""
    reason = mailbox.unreachable(sender)
    if reason is not None:
        return f"{hello.replica} at {sender}: {reason}"
    first = hello.stages[0] if hello.stages else -1
    if not 0 <= first < len(pipeline.stages):
        return None  # the fleet refuses it for its stages
    expected = pipeline.stages[first].identity
    if hello.bundle == expected:
        return None
    return f"{hello.replica}: parameters {hello.bundle[:12]} of stage {first}, not {expected[:12]}"
