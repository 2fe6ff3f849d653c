"""A bundle's home over HTTP: its files fetched into a folder of this machine, so that it can be read there.

Before `bundle.store`, for whoever is told an `http(s)://` address and has no KeysManager that reads it: a pod
(`keysmanager.pod`), `worker.app`, `router.app`; the controller takes `pipeline.json` alone. Stages' files are
checked against their hashes chunk by chunk as they come; a broken transfer goes on where its last whole chunk
ended. Nothing is fetched that `pipeline.json` does not name, no more of it than it says, and no redirect is
followed. This module must not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from keystage.bundle import home_http
from keystage.bundle.api import CHUNK_BYTES, CPU_PROFILE, Pipeline, StageSpec
from keystage.bundle.errors import BundleError
from keystage.bundle.hashing import identity
from keystage.bundle.home_http import HomeError, NotThere
from keystage.bundle.store import PIPELINE_FILE, bundle_path, decode, stage_of

MAX_SMALL_BYTES = 64 * 1024 * 1024
"""Bound of a `pipeline.json` or tokenizer; the largest known tokenizers take 20 MB."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How long a home may take.

    Attributes:
        connect_s: until a connection stands.
        silent_s: without a single byte.
        small_s: for a small file as a whole.
        slowest_bytes_s: a stage's file may take `small_s` and one second for each so many bytes.
        tries: of a transfer that breaks; each goes on where the last one ended.
        pause_s: before the second try, doubled before each further one.
    """

    connect_s: float = 5.0
    silent_s: float = 15.0
    small_s: float = 30.0
    slowest_bytes_s: float = 1e6
    tries: int = 5
    pause_s: float = 0.2


LIMITS = Limits()


def is_http(bundle: str) -> bool:
    """Whether a bundle's home is read over HTTP."""
    return bundle.startswith(("http://", "https://"))


def file_url(bundle: str, name: str) -> str:
    """Address of a file in an HTTP home."""
    return f"{bundle.removesuffix('/' + PIPELINE_FILE).rstrip('/')}/{quote(name)}"


def folder_in(run: Path, bundle: str) -> Path:
    """Where a process fetches a bundle to, within its run folder."""
    return run / "bundles" / hashlib.sha256(bundle.encode(errors="surrogatepass")).hexdigest()[:16]


def local_folder(bundle: str, folder: Path, limits: Limits = LIMITS) -> Path:
    """A folder of this machine with the bundle's small files.

    Args:
        bundle: address of the bundle.
        folder: gets `pipeline.json`, tokenizer and profile of an HTTP home; made if missing.
        limits: how long it may take.

    Returns:
        The bundle's own folder for a `file://` address or path, else `folder`.

    Raises:
        BundleError: no bundle there, or it could not be fetched in time.
    """
    if not is_http(bundle):
        return bundle_path(bundle)
    body = _small(bundle, PIPELINE_FILE, limits)
    pipeline = decode(body, Path(PIPELINE_FILE))
    for name in (pipeline.tokenizer, CPU_PROFILE):
        if not name:
            continue
        try:
            _keep(folder / name, _small(bundle, name, limits))
        except _Missing:
            if name == pipeline.tokenizer:
                raise
    _keep(folder / PIPELINE_FILE, body)  # last: who finds it finds the others
    return folder


def description(bundle: str, limits: Limits = LIMITS) -> Pipeline:
    """`pipeline.json` of an HTTP home, nothing kept.

    Raises:
        BundleError: no bundle there, or it could not be fetched in time.
    """
    return decode(_small(bundle, PIPELINE_FILE, limits), Path(f"{bundle} {PIPELINE_FILE}"))


def fetch_stage(bundle: str, folder: Path, pipeline: Pipeline, index: int, limits: Limits = LIMITS) -> Path:
    """Fetches a stage's file from an HTTP home, unless it is there; what an earlier try left is used.

    Args:
        bundle: address of the bundle.
        folder: where to.
        pipeline: its description: tells length and hashes.
        index: the stage.
        limits: how long it may take.

    Returns:
        The file, every chunk of it checked.

    Raises:
        BundleError: not there, altered, of another length, too slow, or no room for it.
    """
    stage = stage_of(pipeline, index)
    path = folder / stage.file
    if not stage.file or path.exists():
        return path
    if identity(stage.chunks, pipeline.dtype) != stage.identity:
        raise BundleError(f"{bundle}: stage {index}: its chunks do not make its identity {stage.identity}")
    partial = folder / f".{stage.file}.partial"
    until_s = time.monotonic() + limits.small_s + stage.nbytes / limits.slowest_bytes_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(partial) as fd:
            _fetch_chunks(bundle, stage, fd, limits, until_s)
        _become(partial, path)
    except OSError as error:
        raise BundleError(f"{path} of {stage.nbytes} bytes: {error.strerror or error}") from error
    return path


def _fetch_chunks(bundle: str, stage: StageSpec, fd: int, limits: Limits, until_s: float) -> None:
    """Writes the file's chunks from the first one that is missing on; only tries without a chunk count."""
    done = _whole_chunks(fd, stage)
    url = file_url(bundle, stage.file)
    failures = 0
    while done < len(stage.chunks):
        begun = done
        try:
            start = done * CHUNK_BYTES
            with home_http.opened(
                url, start, stage.nbytes, limits.connect_s, limits.silent_s, until_s
            ) as body:
                while done < len(stage.chunks):
                    _take_chunk(body, stage, done, fd, url)
                    done += 1
        except NotThere as error:
            raise _Missing(f"{url}: {error}") from error
        except HomeError as error:
            failures = 0 if done > begun else failures + 1
            pause_s = limits.pause_s * 2.0**failures
            is_over = failures >= limits.tries or time.monotonic() + pause_s >= until_s
            if is_over or not error.is_passing:
                raise BundleError(f"{url}: {error}; {done} of {len(stage.chunks)} chunks came") from error
            time.sleep(pause_s)


def _take_chunk(body: home_http.Body, stage: StageSpec, number: int, fd: int, url: str) -> None:
    offset = number * CHUNK_BYTES
    end = min(offset + CHUNK_BYTES, stage.nbytes)
    digest = hashlib.sha256()
    while offset < end:
        block = body.read(end - offset)
        digest.update(block)
        view = memoryview(block)
        while view:
            try:
                written = os.pwrite(fd, view, offset)
            except OSError as error:
                raise BundleError(f"{url}: no room for {stage.nbytes} bytes: {error.strerror}") from error
            offset += written
            view = view[written:]
    if digest.hexdigest() != stage.chunks[number]:
        raise BundleError(
            f"{url}: chunk {number} altered: SHA-256 {stage.chunks[number]} expected, "
            f"{digest.hexdigest()} came"
        )


def _whole_chunks(fd: int, stage: StageSpec) -> int:
    """How many chunks from the start an earlier try has left, whole and right."""
    size = min(os.fstat(fd).st_size, stage.nbytes)
    for number, expected in enumerate(stage.chunks):
        end = min((number + 1) * CHUNK_BYTES, stage.nbytes)
        if end > size:
            return number
        if (
            hashlib.sha256(os.pread(fd, end - number * CHUNK_BYTES, number * CHUNK_BYTES)).hexdigest()
            != expected
        ):
            return number
    return len(stage.chunks)


def _become(partial: Path, path: Path) -> None:
    """Gives a checked file its name, unless another process was faster with the same partial file."""
    try:
        partial.replace(path)
    except FileNotFoundError:
        if not path.exists():
            raise


class _Missing(BundleError):
    """The home has no such file."""


def _small(bundle: str, name: str, limits: Limits) -> bytes:
    url = file_url(bundle, name)
    until_s = time.monotonic() + limits.small_s
    for left in reversed(range(limits.tries)):
        try:
            with home_http.opened(url, 0, None, limits.connect_s, limits.silent_s, until_s) as body:
                return body.read_all(MAX_SMALL_BYTES)
        except NotThere as error:
            raise _Missing(f"{url}: {error}") from error
        except HomeError as error:
            pause_s = limits.pause_s * 2.0 ** (limits.tries - 1 - left)
            if not left or not error.is_passing or time.monotonic() + pause_s >= until_s:
                raise BundleError(f"{url}: {error}") from error
        time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _keep(path: Path, body: bytes) -> None:
    """Writes a file, atomically; its folder is made if missing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(body)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"{path} of {len(body)} bytes: {error.strerror or error}") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
