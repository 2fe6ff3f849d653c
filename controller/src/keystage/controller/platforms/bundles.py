"""What bundles say of their stages: pipeline.json and the CPU profile beside it.

Before it: addresses in functions' environments. After it: a platform's `observe`. A `file://` address is a
folder that is mounted here; from `http(s)://` homes both files are fetched by a thread of its own into a
folder, so that a slow home holds up nothing. What cannot be read is left out: then sizes and profiles are
not known. It must not read parameters.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
import urllib3

from keystage.bundle.api import CPU_PROFILE, Pipeline
from keystage.controller.platforms.local_cpu import CpuProfiles, Work
from keystage.wire.unreadable import UNREADABLE

REFRESH_S = 60.0
RETRY_S = 5.0
TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20
"""pipeline.json of a model of 1 TB has a hash of 64 characters for each 16 MiB: some 5 MB."""
PIPELINE = "pipeline.json"
log = logging.getLogger(__name__)


class Bundles:
    """All bundles in use; those of remote homes only between `start` and `stop`.

    Args:
        folder: where copies from remote homes are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, Pipeline]] = {}
        self._profiles = CpuProfiles()
        self._due_s: dict[str, float] = {}
        self._urls: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._http = urllib3.PoolManager(num_pools=8, maxsize=1, retries=False)
        self._thread = threading.Thread(target=self._run, name="bundles", daemon=True)

    def start(self) -> None:
        """Begins to fetch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the exchange in progress; one that a home draws out is left to its daemon thread."""
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)

    def read(self, urls: Collection[str]) -> tuple[dict[str, Pipeline], dict[str, Sequence[Work | None]]]:
        """pipeline.json and CPU fits of those that can be read now, by address."""
        if not self._urls.issuperset(urls):
            self._woken.set()
        self._urls = frozenset(urls)
        pipelines: dict[str, Pipeline] = {}
        work: dict[str, Sequence[Work | None]] = {}
        for url in urls:
            folder = self.folder_of(url)
            pipeline = self._pipeline(url, folder) if folder is not None else None
            if folder is not None and pipeline is not None:
                pipelines[url] = pipeline
                work[url] = self._profiles.read(folder)
        return pipelines, work

    def folder_of(self, url: str) -> Path | None:
        """Folder where a bundle's descriptions are, None for what is no address of one."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return None
        if parts.scheme == "file":
            path = unquote(parts.path)
            return None if "\0" in path else Path(path)
        if parts.scheme in ("http", "https"):
            return self._folder / hashlib.sha256(url.encode()).hexdigest()[:32]
        return None

    def fetch(self, url: str) -> None:
        """Copies the descriptions of a remote bundle; what is not there is no copy either.

        Raises:
            OSError: the home does not answer, refuses, or a copy cannot be written.
        """
        folder = self.folder_of(url)
        assert folder is not None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (PIPELINE, CPU_PROFILE):
            body = self._get(f"{url.rstrip('/')}/{name}")
            path = folder / name
            if body is None:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != body:
                fresh = path.with_suffix(".new")
                fresh.write_bytes(body)
                fresh.replace(path)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            urls = [
                url for url in self._urls if url.startswith(("http://", "https://")) and self.folder_of(url)
            ]
            self._due_s = {url: due_s for url, due_s in self._due_s.items() if url in urls}
            for url in urls:
                if time.monotonic() < self._due_s.get(url, 0.0) or self._stop.is_set():
                    continue
                wait_s = REFRESH_S
                try:
                    self.fetch(url)
                except OSError as error:
                    log.warning("bundle %s is not known here: %s", url, error)
                    wait_s = RETRY_S
                self._due_s[url] = time.monotonic() + wait_s
            self._woken.wait(RETRY_S)

    def _get(self, url: str) -> bytes | None:
        try:
            answer = self._http.request("GET", url, timeout=TIMEOUT_S, preload_content=False)
            try:
                body = answer.read(MAX_BYTES + 1)
            finally:
                answer.release_conn()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException) as error:
            raise OSError(f"GET {url}: {error}") from error
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise OSError(f"GET {url} answered {answer.status}")
        if len(body) > MAX_BYTES:
            raise OSError(f"GET {url}: more than {MAX_BYTES} bytes")
        return body

    def _pipeline(self, url: str, folder: Path) -> Pipeline | None:
        path = folder / PIPELINE
        try:
            written_ns = path.stat().st_mtime_ns
            known = self._known.get(url)
            if known is None or known[0] != written_ns:
                known = (written_ns, msgspec.json.decode(path.read_bytes(), type=Pipeline))
                self._known[url] = known
        except (OSError, *UNREADABLE):
            self._known.pop(url, None)  # the worker that needs it names the fault; here it only informs
            return None
        return known[1]
