"""The small files of a bundle at an `http(s)://` home, copied to a folder of this machine.

Used by `catalog` alone. One folder a version, named by the hash of what is in it and never changed once
it stands, so that a reader sees one version whole; the newest is named in a file beside them and serves
while the home cannot be reached. The parameters' files are not copied: `loader` fetches those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
from pathlib import Path

from keystage.bundle.api import CPU_PROFILE
from keystage.bundle.errors import BundleError
from keystage.bundle.home import file_url
from keystage.bundle.store import PIPELINE_FILE, decode
from keystage.keysmanager.loader_http import HttpLimits, get_small
from keystage.keysmanager.loader_source import NotThere, SourceError

log = logging.getLogger(__name__)

LIMITS = HttpLimits(connect_s=3.0, silent_s=5.0, span_s=30.0)
"""Somebody waits for a replica while these are fetched."""

_KEPT_VERSIONS = 3
_CURRENT = "current"


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """A version of a bundle's small files: their folder, and what the server calls its pipeline.json."""

    folder: Path
    etag: str


class HomeCopy:
    """The copy of one bundle."""

    def __init__(self, bundle: str, folder: Path) -> None:
        """Names the bundle's address and the folder for all copies."""
        self._bundle = bundle
        self._base = folder / hashlib.sha256(bundle.encode(errors="surrogatepass")).hexdigest()[:16]

    def refresh(self, etag: str) -> Version:
        """Asks the home for a newer version and copies it.

        Args:
            etag: of the version at hand, empty: none, or its name is unknown.

        Returns:
            The newest version; the one at hand if the home cannot be reached.

        Raises:
            BundleError: there is none, here or there, or the home's is damaged.
        """
        current = self._current()
        try:
            given = get_small(file_url(self._bundle, PIPELINE_FILE), etag if current else "", LIMITS)
            if given.body is None:
                assert current is not None
                return Version(current, given.etag)
            files = {PIPELINE_FILE: given.body, **self._others(given.body)}
            return Version(self._keep(files), given.etag)
        except SourceError as error:
            if current is None or isinstance(error, NotThere):
                raise BundleError(f"{self._bundle}: {error}") from error
            log.warning("%s: %s; its last known version is used", self._bundle, error)
            return Version(current, etag)
        except OSError as error:
            raise BundleError(
                f"{self._bundle}: no copy at {self._base}: {error.strerror or error}"
            ) from error

    def _others(self, body: bytes) -> dict[str, bytes]:
        pipeline = decode(body, Path(PIPELINE_FILE))
        files: dict[str, bytes] = {}
        for name in (pipeline.tokenizer, CPU_PROFILE):
            if not name:
                continue
            with contextlib.suppress(NotThere):
                files[name] = get_small(file_url(self._bundle, name), limits=LIMITS).body or b""
        if pipeline.tokenizer and pipeline.tokenizer not in files:
            raise BundleError(f"{self._bundle}: its tokenizer {pipeline.tokenizer!r} is not there (404)")
        return files

    def _current(self) -> Path | None:
        try:
            folder = self._base / Path((self._base / _CURRENT).read_text()).name
        except OSError:
            return None
        return folder if (folder / PIPELINE_FILE).is_file() else None

    def _keep(self, files: dict[str, bytes]) -> Path:
        digest = hashlib.sha256()
        for name, body in sorted(files.items()):
            digest.update(f"{name}\0{len(body)}\0".encode() + hashlib.sha256(body).digest())
        folder = self._base / digest.hexdigest()[:32]
        if not folder.is_dir():
            partial = self._base / f".partial-{os.getpid()}"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True, mode=0o700)
            try:
                for name, body in files.items():
                    (partial / name).write_bytes(body)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        os.utime(folder)
        mark = self._base / f".{_CURRENT}-{os.getpid()}"
        mark.write_text(folder.name)
        mark.replace(self._base / _CURRENT)
        versions = [path for path in self._base.iterdir() if path.is_dir() and not path.name.startswith(".")]
        for old in sorted(versions, key=lambda path: path.stat().st_mtime_ns)[:-_KEPT_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)
        return folder
