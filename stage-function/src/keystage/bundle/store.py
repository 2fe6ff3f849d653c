"""A bundle on disk: read and write `pipeline.json`, check the stages' files.

`bundle.split` writes through here; router, worker and controller read through here. What is
missing, cut short, altered or unknown is refused by name and never served.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import msgspec

from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageProfile, StageSpec
from keystage.bundle.errors import BundleError
from keystage.bundle.hashing import file_chunks, identity
from keystage.streams import graph_checks
from keystage.wire.unreadable import UNREADABLE

PIPELINE_FILE = "pipeline.json"
MAX_NAME_BYTES = 255
_SEPARATORS = frozenset("/\0")


def bundle_path(location: str | os.PathLike[str]) -> Path:
    """Turns a path or a `file://` address into the folder of a bundle.

    Args:
        location: the folder, the `pipeline.json` in it, or `file://` in front of either.

    Raises:
        BundleError: the address has another scheme, or names another host.
    """
    text = os.fspath(location)
    address = urlparse(text)
    if "://" in text:
        if address.scheme != "file" or address.netloc not in ("", "localhost"):
            raise BundleError(f"bundle address {text!r}: only file:///folder on this machine can be read")
        text = unquote(address.path)
    path = Path(text)
    return path.parent if path.name == PIPELINE_FILE else path


def load(location: str | os.PathLike[str]) -> Pipeline:
    """Reads `pipeline.json` and checks that it is consistent in itself.

    Args:
        location: see `bundle_path`.

    Raises:
        BundleError: missing file, garbled JSON, wrong types, unknown version, stages out of order.
    """
    path = bundle_path(location) / PIPELINE_FILE
    try:
        body = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror or error}") from error
    return decode(body, path)


def decode(body: bytes, path: Path) -> Pipeline:
    """Checks the content of a `pipeline.json` as `load` does.

    Args:
        body: the content.
        path: where it is from, for the message.

    Raises:
        BundleError: garbled JSON, wrong types, unknown version, stages out of order.
    """
    try:
        version = msgspec.json.decode(body, type=dict[str, Any]).get("version")
        if version != BUNDLE_VERSION:
            raise BundleError(f"{path}: bundle version {version!r}, this program reads {BUNDLE_VERSION}")
        pipeline = msgspec.json.decode(body, type=Pipeline)
    except UNREADABLE as error:
        raise BundleError(f"{path}: not a pipeline description: {error}") from error
    _check_stages(path, pipeline)
    _check_program(path, pipeline)
    return pipeline


def _check_program(path: Path, pipeline: Pipeline) -> None:
    """A stream program has a graph that can work, with a module a stage; nothing else has one."""
    is_program = pipeline.execution == "program"
    if is_program != (pipeline.graph is not None) or is_program != (pipeline.program is not None):
        raise BundleError(
            f"{path}: execution {pipeline.execution}: a graph and a program belong to `program`"
        )
    if pipeline.graph is None:
        return
    try:
        graph_checks.check(pipeline.graph)
    except graph_checks.GraphError as error:
        raise BundleError(f"{path}: {error}") from error
    if len(pipeline.graph.modules) != len(pipeline.stages):
        raise BundleError(
            f"{path}: {len(pipeline.graph.modules)} modules in {len(pipeline.stages)} stages, one each is due"
        )


def is_file_name(name: str) -> bool:
    """Whether it names a file of a folder, and nothing outside of it."""
    size = len(name.encode("utf-8", "surrogatepass"))
    return 0 < size <= MAX_NAME_BYTES and name not in (".", "..") and _SEPARATORS.isdisjoint(name)


def _check_stages(path: Path, pipeline: Pipeline) -> None:
    if not pipeline.stages:
        raise BundleError(f"{path}: 0 stages, at least 1 is needed")
    if pipeline.tokenizer and not is_file_name(pipeline.tokenizer):
        raise BundleError(f"{path}: tokenizer {pipeline.tokenizer[:300]!r} lies outside the bundle")
    expected = 0
    for index, stage in enumerate(pipeline.stages):
        if stage.index != index:
            raise BundleError(f"{path}: stage {index} carries index {stage.index}")
        if stage.file and not is_file_name(stage.file):
            raise BundleError(f"{path}: stage {index}: file {stage.file[:300]!r} lies outside the bundle")
        first, end = stage.layers
        if first != expected or end <= first:
            raise BundleError(
                f"{path}: stage {index} holds layers {first} to {end - 1}, expected to start at {expected}"
            )
        expected = end


def write(bundle_dir: Path, pipeline: Pipeline) -> None:
    """Writes `pipeline.json`, atomically."""
    path = bundle_dir / PIPELINE_FILE
    partial = bundle_dir / f".{PIPELINE_FILE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(pipeline), indent=1) + b"\n")
    partial.replace(path)


def with_profiles(pipeline: Pipeline, profiles: list[StageProfile]) -> Pipeline:
    """The same pipeline with the service time of every stage filled in."""
    stages = [
        msgspec.structs.replace(stage, profile=profile)
        for stage, profile in zip(pipeline.stages, profiles, strict=True)
    ]
    return msgspec.structs.replace(pipeline, stages=stages)


def verify(bundle_dir: str | os.PathLike[str], stage: StageSpec | int, dtype: str | None = None) -> None:
    """Checks the file of one stage against its hashes.

    Args:
        bundle_dir: folder of the bundle (or its `file://` address).
        stage: the stage, or its index in the bundle's `pipeline.json`.
        dtype: element type of the pipeline; read from `pipeline.json` when None.

    Raises:
        BundleError: missing, truncated or altered file, or hashes that do not match the identity;
            names the file, the expected and the actual value.
    """
    folder = bundle_path(bundle_dir)
    if isinstance(stage, int) or dtype is None:
        pipeline = load(folder)
        dtype = pipeline.dtype
        stage = stage_of(pipeline, stage) if isinstance(stage, int) else stage
    if not stage.file:
        return
    check_size(folder, stage)
    check_chunks(folder / stage.file, stage, dtype, file_chunks(folder / stage.file))


def stage_of(pipeline: Pipeline, index: int) -> StageSpec:
    """The stage with this index.

    Raises:
        BundleError: there is none.
    """
    if not 0 <= index < len(pipeline.stages):
        raise BundleError(
            f"stage {index}: pipeline {pipeline.name} has stages 0 to {len(pipeline.stages) - 1}"
        )
    return pipeline.stages[index]


def check_size(folder: Path, stage: StageSpec) -> None:
    """Checks that the file of a stage exists and has its length.

    Raises:
        BundleError: it does not.
    """
    path = folder / stage.file
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror or error}") from error
    if actual != stage.nbytes:
        word = "truncated" if actual < stage.nbytes else "too long"
        raise BundleError(f"{path}: {word}: {stage.nbytes} bytes expected, {actual} found")


def check_chunks(path: Path, stage: StageSpec, dtype: str, actual: list[str]) -> None:
    """Compares chunk hashes with those of the bundle.

    Args:
        path: the file, for the message.
        stage: what is expected.
        dtype: element type of the pipeline.
        actual: SHA-256 of each chunk as found.

    Raises:
        BundleError: at the first difference.
    """
    if len(actual) != len(stage.chunks):
        raise BundleError(f"{path}: {len(stage.chunks)} chunks expected, {len(actual)} found")
    for number, (want, have) in enumerate(zip(stage.chunks, actual, strict=True)):
        if want != have:
            raise BundleError(f"{path}: chunk {number} altered: SHA-256 {want} expected, {have} found")
    named = identity(actual, dtype)
    if named != stage.identity:
        raise BundleError(f"{path}: identity {stage.identity} expected, {named} found")
