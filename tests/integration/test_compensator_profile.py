"""The CPU profile of a real bundle: measured, written, read back and fitted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.api import CpuProfile
from keystage.bundle.split import split
from keystage.controller.maths import cpu_fit
from keystage.controller.platforms.local_cpu import CpuProfiles
from keystage.models.cpu_profile import profile_cpu


def test_a_profile_has_every_thread_number_and_batch_and_can_be_fitted(tmp_path: Path) -> None:
    bundle = split(write_folder(tiny_model(), tmp_path / "model"), 2, "uniform", tmp_path / "b", "tiny")
    before = torch.get_num_threads()
    profile = profile_cpu(bundle, [1, 2], batches=(1, 4), repeats=3, write=True)
    assert torch.get_num_threads() == before
    written = msgspec.json.decode((bundle / "cpu-profile.json").read_bytes(), type=CpuProfile)
    assert written == profile
    assert len(profile.stages) == 2
    for rows in profile.stages:
        assert [(r.cores, r.batch) for r in rows] == [
            (c, b) for c in (1, 2) for b in (1, 4) for _ in range(3)
        ]
        assert all(r.latency_s > 0 and r.activation_bytes > 0 and r.parameters > 0 for r in rows)
        found = cpu_fit.per_core_s(rows)
        assert found is not None
        assert found[1] < found[0] < found[2]
    assert CpuProfiles().read(bundle) == [cpu_fit.per_core_s(rows) for rows in profile.stages]
