"""Which versions of the messages two parts have in common. Pure.

`Hello` and `Introduce` carry the lowest and the highest version that their sender speaks; both then speak the
highest that they have in common, so that parts can be replaced one by one. A version is raised when a field
changes its meaning; one more field at the end, with a default, or one more kind of message raises nothing.
CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """Versions from `least` to `most`.

    Attributes:
        least: lowest version spoken.
        most: highest version spoken.
    """

    least: int
    most: int

    @property
    def text(self) -> str:
        """In words: `version 2`, `versions 2 to 4`."""
        return f"version {self.most}" if self.least == self.most else f"versions {self.least} to {self.most}"


WIRE_VERSION = 2
"""The newest. New kinds of messages do not raise it: only pipelines of a new kind are sent them, and both
sides read the kind in the bundle."""
VERSIONS = Versions(2, WIRE_VERSION)
"""Those that this code speaks: the one before the newest as well, once there is one more."""


def spoken(least: int, most: int) -> Versions:
    """What a peer said; one that names its lowest version alone (`most` 0) speaks no other."""
    return Versions(least, max(least, most))


def common(ours: Versions, theirs: Versions) -> int | None:
    """The highest version that both speak; None: there is none."""
    most = min(ours.most, theirs.most)
    return most if most >= max(ours.least, theirs.least) else None


def differ(who: str, theirs: Versions, we: str, ours: Versions) -> str:
    """Why two parts cannot talk."""
    return f"{who} speaks wire {theirs.text}, {we} {ours.text}: upgrade the older one"
