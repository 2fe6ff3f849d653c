"""What a stage's name stands for: its parameters' identity, length and hashes, read from its bundle.

Asked by the daemon before anything is loaded, and again now and then: a bundle that was replaced where it
lies resolves to another identity from then on. Homes are `file://` folders or `http(s)://` addresses; of
the latter the small files are copied to a folder here (`catalog_home`), so that a router or worker
reads its bundle from a `file://` address whatever its home is. Parameters are never read here.

Methods block on disk and network and may be called from any thread, never from an event loop.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.bundle.home import MAX_SMALL_BYTES, is_http
from keystage.bundle.store import PIPELINE_FILE, bundle_path, decode, stage_of
from keystage.keysmanager.api import Parameters, StageName
from keystage.keysmanager.catalog_home import HomeCopy

HTTP_FRESH_S = 5.0
"""A home over HTTP is asked again after this long; a file is looked at every time."""

_READ_TRIES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """One version of a bundle.

    Attributes:
        pipeline, body: its description, parsed and raw.
        folder: where its small files lie on this machine.
        stamp: tells versions apart without reading: facts of the file, or what the server named.
        checked_s: when it was looked at.
    """

    pipeline: Pipeline
    body: bytes
    folder: Path
    stamp: object
    checked_s: float


class Catalog:
    """Bundles known to this node, read as they are asked for."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Names the folder for copies; nothing is read.

        Args:
            folder: gets the small files of HTTP homes; made when needed.
            clock: seconds.
        """
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._reading: dict[str, threading.Lock] = {}

    def resolve(self, name: StageName) -> tuple[Parameters, bytes]:
        """What a stage's name stands for now.

        Returns:
            Its parameters, and the content of its bundle's `pipeline.json`.

        Raises:
            BundleError: no such bundle or stage, a damaged description, or a stage without parameters.
        """
        known = self._look(name.bundle)
        pipeline = known.pipeline
        stage = stage_of(pipeline, name.stage)
        if not stage.file:
            raise BundleError(f"stage {name.stage} of {pipeline.name} is emulated: it has no parameters")
        parameters = Parameters(
            name=name,
            pipeline=pipeline.name,
            identity=stage.identity,
            dtype=pipeline.dtype,
            file=stage.file,
            nbytes=stage.nbytes,
            chunks=tuple(stage.chunks),
        )
        return parameters, known.body

    def pipeline(self, bundle: str) -> tuple[Pipeline, bytes]:
        """The description of a bundle, parsed and raw.

        Raises:
            BundleError: it cannot be read or is damaged.
        """
        known = self._look(bundle)
        return known.pipeline, known.body

    def local_folder(self, bundle: str) -> Path:
        """A folder on this machine with the small files of a bundle (`pipeline.json`, tokenizer, profile).

        The bundle's own for a `file://` home; a copy, one folder a version, for an HTTP one.

        Raises:
            BundleError: it cannot be read or is damaged.
        """
        return self._look(bundle).folder

    def _look(self, bundle: str) -> _Known:
        with self._lock:
            reading = self._reading.setdefault(bundle, threading.Lock())
        with reading:  # two requests for one bundle read it once; other bundles do not wait for it
            before = self._known.get(bundle)
            try:
                known = self._from_http(bundle, before) if is_http(bundle) else _from_file(bundle, before)
            except BundleError:
                if before is None:
                    with self._lock:
                        self._reading.pop(bundle, None)
                raise
            self._known[bundle] = known
            return known

    def _from_http(self, bundle: str, before: _Known | None) -> _Known:
        now_s = self._clock()
        if before is not None and now_s - before.checked_s < HTTP_FRESH_S:
            return before
        if "@" in bundle.split("/")[2]:
            raise BundleError("bundle address with credentials: they would end in logs; use one without")
        copy = HomeCopy(bundle, self._folder)
        version = copy.refresh("" if before is None else str(before.stamp))
        if before is not None and version.folder == before.folder:
            return dataclasses.replace(before, stamp=version.etag, checked_s=now_s)
        body = (version.folder / PIPELINE_FILE).read_bytes()
        pipeline = decode(body, version.folder / PIPELINE_FILE)
        return _Known(pipeline, body, version.folder, version.etag, now_s)


def _from_file(bundle: str, before: _Known | None) -> _Known:
    folder = bundle_path(bundle)
    path = folder / PIPELINE_FILE
    try:
        for _ in range(_READ_TRIES):
            if before is not None and _stamp(path.stat()) == before.stamp:
                return before
            with path.open("rb") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                body = file.read(MAX_SMALL_BYTES + 1)
                is_whole = stamp == _stamp(os.fstat(file.fileno()))
            if len(body) > MAX_SMALL_BYTES:
                raise BundleError(f"{path}: larger than {MAX_SMALL_BYTES} bytes")
            if is_whole:
                return _Known(decode(body, path), body, folder, stamp, 0.0)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror or error}") from error
    raise BundleError(f"{path}: changed while it was read, {_READ_TRIES} times")


def _stamp(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
