"""CPU cores of local stages: what each has, may have, and is known to gain by more.

Before it: function records and bundles. After it: `StageView.cpu`. A bundle's `cpu-profile.json` is fitted
once per change of the file; without one nothing is known to be gained and the policy leaves cores alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keystage.bundle.api import CPU_PROFILE, CpuProfile
from keystage.controller.domain.snapshot import CpuView
from keystage.controller.maths import cpu_fit
from keystage.controller.maths.regression import BadProfile

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
    except (OSError, msgspec.DecodeError) as error:
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


def cpu_view(cores: float, running: int, free: float, fits: Sequence[Work | None], stage: int) -> CpuView:
    """Cores of one stage's replicas.

    Args:
        cores: what each has.
        running: its replicas.
        free: cores of the machine that no replica has; negative where replicas take turns.
        fits: of its bundle.
        stage: its index.
    """
    most = cores + max(0, int(free / max(1, running)))
    work = fits[stage] if stage < len(fits) else None
    if work is None:
        return CpuView(cores, most)
    return CpuView(cores, most, *work)
