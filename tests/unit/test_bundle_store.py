"""Bundles on disk: what is missing, cut short or altered is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keystage.bundle import store
from keystage.bundle.api import CHUNK_BYTES, Pipeline, StageProfile, StageSpec, emulated
from keystage.bundle.errors import BundleError
from keystage.bundle.hashing import buffer_chunks, file_chunks, identity
from keystage.bundle.split import bundle_emulated


def bundle_of(folder: Path, bodies: list[bytes]) -> Pipeline:
    stages: list[StageSpec] = []
    for index, body in enumerate(bodies):
        file = folder / f"stage-{index:02d}.safetensors"
        file.write_bytes(body)
        chunks = file_chunks(file)
        stages.append(
            StageSpec(
                index, file.name, (index, index + 1), 1, len(body), chunks, identity(chunks, "float32"), 8
            )
        )
    empty = emulated("p", len(bodies), execution="looping")
    pipeline = msgspec.structs.replace(empty, family="llama", dtype="float32", stages=stages)
    store.write(folder, pipeline)
    return pipeline


def test_round_trip_by_path_file_and_address(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    pipeline = bundle_of(folder, [b"abc", b"defg"])
    assert store.load(folder) == pipeline
    assert store.load(folder / "pipeline.json") == pipeline
    assert store.load(folder.as_uri()) == pipeline
    assert store.load(str(folder)) == pipeline
    assert [path.name for path in folder.glob(".*")] == []


def test_chunks_are_sha256_of_16_mib_each(tmp_path: Path) -> None:
    body = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
    path = tmp_path / "file"
    path.write_bytes(body)
    expected = [hashlib.sha256(body[:CHUNK_BYTES]).hexdigest(), hashlib.sha256(b"tail").hexdigest()]
    assert file_chunks(path) == expected
    assert buffer_chunks(memoryview(body)) == expected
    assert identity(expected, "float32") != identity(expected, "bfloat16")
    assert identity(expected, "float32") != identity(expected[::-1], "float32")


def test_a_whole_bundle_verifies(tmp_path: Path) -> None:
    pipeline = bundle_of(tmp_path, [b"abc", b"defg"])
    store.verify(tmp_path, 1)
    store.verify(tmp_path, pipeline.stages[0], "float32")


def test_an_altered_byte_is_found(tmp_path: Path) -> None:
    pipeline = bundle_of(tmp_path, [b"abc", b"defg"])
    (tmp_path / "stage-01.safetensors").write_bytes(b"deFg")
    found = hashlib.sha256(b"deFg").hexdigest()
    with pytest.raises(
        BundleError, match=f"stage-01.*{pipeline.stages[1].chunks[0]} expected, {found} found"
    ):
        store.verify(tmp_path, 1)


@pytest.mark.parametrize(("body", "word"), [(b"de", "truncated"), (b"defgh", "too long")])
def test_another_length_is_found(body: bytes, word: str, tmp_path: Path) -> None:
    bundle_of(tmp_path, [b"abc", b"defg"])
    (tmp_path / "stage-01.safetensors").write_bytes(body)
    with pytest.raises(BundleError, match=f"stage-01.*{word}: 4 bytes expected, {len(body)} found"):
        store.verify(tmp_path, 1)


def test_a_missing_file_or_stage_is_named(tmp_path: Path) -> None:
    bundle_of(tmp_path, [b"abc"])
    (tmp_path / "stage-00.safetensors").unlink()
    with pytest.raises(BundleError, match=r"stage-00\.safetensors: No such file"):
        store.verify(tmp_path, 0)
    with pytest.raises(BundleError, match="stage 1: pipeline p has stages 0 to 0"):
        store.verify(tmp_path, 1)


def test_an_identity_that_does_not_fit_is_found(tmp_path: Path) -> None:
    pipeline = bundle_of(tmp_path, [b"abc"])
    forged = msgspec.structs.replace(pipeline.stages[0], identity="00")
    with pytest.raises(BundleError, match="identity 00 expected"):
        store.verify(tmp_path, forged, "float32")


def _version(fields: dict[str, Any]) -> None:
    fields["version"] = 2


def _no_stages(fields: dict[str, Any]) -> None:
    fields["stages"] = []


def _gap(fields: dict[str, Any]) -> None:
    fields["stages"][1]["layers"] = [2, 3]


def _empty_stage(fields: dict[str, Any]) -> None:
    fields["stages"][1]["layers"] = [1, 1]


def _order(fields: dict[str, Any]) -> None:
    fields["stages"].reverse()


def _outside(fields: dict[str, Any]) -> None:
    fields["stages"][0]["file"] = "../secret"


def _type(fields: dict[str, Any]) -> None:
    fields["eos"] = "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_version, "bundle version 2, this program reads 1"),
        (_no_stages, "0 stages"),
        (_gap, "stage 1 holds layers 2 to 2, expected to start at 1"),
        (_empty_stage, "stage 1 holds layers"),
        (_order, "stage 0 carries index 1"),
        (_outside, "outside the bundle"),
        (_type, "not a pipeline description"),
    ],
)
def test_bad_descriptions_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    bundle_of(tmp_path, [b"abc", b"defg"])
    path = tmp_path / "pipeline.json"
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(BundleError, match=message):
        store.load(tmp_path)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_garbage_is_refused(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "pipeline.json").write_bytes(body)
    with pytest.raises(BundleError, match=r"pipeline\.json"):
        store.load(tmp_path)


@pytest.mark.parametrize("address", ["http://host/bundle", "file://elsewhere/bundle"])
def test_addresses_that_cannot_be_read_here_are_refused(address: str) -> None:
    with pytest.raises(BundleError, match="only file:///folder"):
        store.load(address)


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nowhere/pipeline\.json: No such file"):
        store.load(tmp_path / "nowhere")


def test_profiles_are_filled_in(tmp_path: Path) -> None:
    pipeline = bundle_of(tmp_path, [b"abc", b"defg"])
    profiles = [StageProfile("cpu", 0.1, 0.2), StageProfile("cpu", 0.3, 0.4, 0.5)]
    store.write(tmp_path, store.with_profiles(pipeline, profiles))
    assert [stage.profile for stage in store.load(tmp_path).stages] == profiles


def test_an_emulated_bundle(tmp_path: Path) -> None:
    folder = bundle_emulated("toy", 3, "single-pass", 4096, 0, tmp_path / "toy")
    pipeline = store.load(folder)
    assert (pipeline.family, pipeline.execution, pipeline.edges) == (
        "emulated",
        "single-pass",
        [(0, 1), (1, 2)],
    )
    store.verify(folder, 2)
    stack = (folder / "stack.yml").read_text()
    assert '"toy-stage-2":' in stack
    assert "KEYSTAGE_DTYPE" not in stack
