"""Profiles: measured per stage, written on request, and the session state untouched."""

from __future__ import annotations

from pathlib import Path

import torch
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle import store
from keystage.bundle.split import split
from keystage.models.profile import profile_bundle


def test_profile_is_written_only_when_asked(tmp_path: Path) -> None:
    folder = split(write_folder(tiny_model(), tmp_path / "m"), 2, "uniform", tmp_path / "bundle", "tiny")
    threads = torch.get_num_threads()
    measured = profile_bundle(folder)
    assert torch.get_num_threads() == threads
    assert [stage.profile for stage in store.load(folder).stages] == [None, None]
    for profile in measured:
        assert profile.device == "cpu"
        assert profile.alpha_s >= 0
        assert profile.alpha_s + profile.beta_s > 0
        assert profile.prefill_token_s > 0
    written = profile_bundle(folder, write=True)
    assert [stage.profile for stage in store.load(folder).stages] == written
