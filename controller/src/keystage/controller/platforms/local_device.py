"""What a stage's environment says of its device: CPU or not, threads, cores, service time of a batch.

Before it: function records and bundles. After it: `local_view`. Names and defaults are the worker's
(`KEYSTAGE_*`, docs/environment.md); what cannot be read here the worker refuses by name, so here it counts
as not said.
"""

from __future__ import annotations

import math
import re

from keystage.bundle.api import StageSpec
from keystage.controller.domain.snapshot import BatchProfile
from keystage.controller.platforms.local_cap import is_capped
from keystage.local.api import FunctionRecord

MAX_BATCH = 64
"""The worker's default of `KEYSTAGE_MAX_BATCH`."""


def device_of(record: FunctionRecord) -> str:
    """`KEYSTAGE_DEVICE`, empty for the default."""
    return record.deployment.envVars.get("KEYSTAGE_DEVICE", "")


def is_on_cpu(record: FunctionRecord) -> bool:
    """Whether it computes on this machine's CPU."""
    return is_capped(device_of(record))


def threads_of(record: FunctionRecord) -> int:
    """Compute threads each replica was deployed with."""
    return _count(record, "KEYSTAGE_THREADS") or 1


def cores_of(record: FunctionRecord) -> float:
    """Cores each replica has: as the controller set them, else its compute threads."""
    return record.cores if record.cores is not None else float(threads_of(record))


def batch_of(record: FunctionRecord, spec: StageSpec | None) -> BatchProfile | None:
    """l(b) on the stage's device, and the largest batch a replica takes; None where nothing tells.

    Args:
        record: its function.
        spec: its entry in pipeline.json, whose profile holds for real devices.
    """
    alpha_s, beta_s = 0.0, 0.0
    if device_of(record).startswith("emulated"):
        alpha_s, beta_s = _emulated(device_of(record))
    elif spec is not None and spec.profile is not None:
        alpha_s, beta_s = spec.profile.alpha_s, spec.profile.beta_s
    if not (alpha_s >= 0 and beta_s >= 0 and 0 < alpha_s + beta_s < math.inf):
        return None
    most = _count(record, "KEYSTAGE_MAX_BATCH") or MAX_BATCH
    slots = _count(record, "KEYSTAGE_SLOTS")  # 0: the worker derives it from the batch
    return BatchProfile(alpha_s, beta_s, min(most, slots) if slots else most)


def _emulated(device: str) -> tuple[float, float]:
    """Seconds per row and per batch of `emulated:alpha=..,beta=..`; the rest (load) is no service."""
    found = dict(re.findall(r"\b(alpha|beta)=([^,]*)", device))
    try:
        return float(found.get("alpha", 0.0)), float(found.get("beta", 0.0))
    except ValueError:
        return 0.0, 0.0


def _count(record: FunctionRecord, name: str) -> int:
    """A number of the environment, 0 where it is none."""
    text = record.deployment.envVars.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
