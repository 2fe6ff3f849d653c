"""CPU cores of local stages: what each has, may have, and is known to gain by more.

Before it: function records and bundles. After it: `StageView.cpu`. A bundle's `cpu-profile.json` is fitted
once per change of the file; without one nothing is known to be gained and the policy leaves cores alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from keystage.bundle.api import CPU_PROFILE, CpuProfile
from keystage.controller.domain.snapshot import CpuView
from keystage.controller.maths import cpu_fit
from keystage.controller.maths.regression import BadProfile
from keystage.wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

Work = tuple[float, float, float]
"""Core-seconds of an item that shrink as 1/cores, and the 95 % interval."""


class CpuProfiles:
    """Fits of the CPU profiles beside bundles, kept until the file changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, list[Work | None]]] = {}

    def read(self, bundle: Path) -> list[Work | None]:
        """The fit per stage, empty where the bundle has no profile (or none that can be read)."""
        path = bundle / CPU_PROFILE
        try:
            written_ns = path.stat().st_mtime_ns
        except OSError:
            self._known.pop(bundle, None)
            return []
        known = self._known.get(bundle)
        if known is None or known[0] != written_ns:
            known = (written_ns, _fits(path))
            self._known[bundle] = known
        return known[1]


def _fits(path: Path) -> list[Work | None]:
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=CpuProfile)
    except (OSError, *UNREADABLE) as error:
        log.warning("%s is not used: %s", path, error)
        return []
    fits: list[Work | None] = []
    for stage, rows in enumerate(profile.stages):
        try:
            fits.append(cpu_fit.per_core_s(rows) if rows else None)
        except BadProfile as error:
            log.warning("%s is not used for stage %d: %s", path, stage, error)
            fits.append(None)
    return fits


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """Cores of one CPU stage's replicas.

    Attributes:
        now: what each has.
        base: what each was deployed with.
        running: its replicas.
        queue: items that wait for it.
        work: what more would be worth, None where nothing is known.
    """

    now: float
    base: float
    running: int
    queue: float
    work: Work | None


def cpu_views(cores: float, stages: Mapping[str, Cores]) -> dict[str, CpuView]:
    """What each stage's replicas have, and may have.

    Free cores go round one by one, the stage with most waiting first, to stages that are known to gain by
    them: if all take what they may, the replicas there are still have no more than the machine has.

    Args:
        cores: of the machine.
        stages: by function.
    """
    free = cores - sum(s.now * s.running for s in stages.values())
    given = dict.fromkeys(stages, 0)
    order = sorted(
        (name for name, s in stages.items() if s.work is not None and s.work[1] > 0),
        key=lambda name: (-stages[name].queue, name),
    )
    while order:
        able = []
        for name in order:
            need = max(1, stages[name].running)
            if need <= free:
                free -= need
                given[name] += 1
                able.append(name)
        order = able
    views = {}
    for name, s in stages.items():
        per_core_s, low_s, high_s = s.work or (None, None, None)
        views[name] = CpuView(s.now, s.now + given[name], per_core_s, low_s, high_s, s.base)
    return views
