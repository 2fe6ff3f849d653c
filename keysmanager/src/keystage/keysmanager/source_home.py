"""The bundle's home as a source, and the order of all sources for one stage.

`plan` is what the daemon's loader asks: local disk, then peers, then the home. A `file://` home is local
disk unless its file system is another machine's (or the environment says which it is).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from keystage.bundle.errors import BundleError
from keystage.bundle.home import file_url, is_http
from keystage.bundle.store import bundle_path, is_file_name
from keystage.keysmanager.api import Parameters, Source
from keystage.keysmanager.disk_cache import DiskCache
from keystage.keysmanager.loader_http import HOME_LIMITS, HttpLimits, RangeReader
from keystage.keysmanager.loader_mounts import file_system, is_network
from keystage.keysmanager.loader_source import LANES, LoadError, ParameterSource
from keystage.keysmanager.source_disk import DiskSource
from keystage.keysmanager.source_peer import PeerSource


class HttpHomeSource:
    """The file of one stage at an `http(s)://` home that serves ranges."""

    kind: Source = "home"

    def __init__(self, parameters: Parameters, limits: HttpLimits = HOME_LIMITS) -> None:
        """Names the address; nothing is opened."""
        self._url = file_url(parameters.name.bundle, parameters.file)
        self._nbytes = parameters.nbytes
        self._limits = limits
        self.name = f"home {self._url}"
        self.lanes = LANES

    def open(self) -> RangeReader:
        """Connects."""
        return RangeReader(self._url, self._nbytes, {"Accept-Encoding": "identity"}, self._limits)

    def facts(self) -> str:
        """Number of connections."""
        return f"{self.lanes} connections"

    def damaged(self) -> None:
        """The home's copy is its owner's to mend."""


def plan(
    parameters: Parameters,
    *,
    cache: DiskCache | None,
    peers: Sequence[str],
    token: str,
    home_is_remote: bool | None = None,
    type_of: Callable[[Path], str] = file_system,
) -> list[ParameterSource]:
    """Where to look for parameters, best first.

    Args:
        parameters: what is wanted.
        cache: the node's disk cache; None: there is none.
        peers: addresses of other nodes' KeysManagers.
        token: their bearer token.
        home_is_remote: whether a `file://` home is another machine's disk; None: by its file system.
        type_of: tells the type of the file system of a path.

    Raises:
        LoadError: the home is no address that can be read, or the file lies outside the bundle.
    """
    if not is_file_name(parameters.file):
        raise LoadError(f"file {parameters.file!r} of {parameters.name.bundle} lies outside the bundle")
    first: list[ParameterSource] = []
    last: list[ParameterSource] = []
    if cache is not None and (copy := cache.find(parameters.identity)) is not None:
        identity = parameters.identity
        first.append(DiskSource(copy, parameters.nbytes, damaged=lambda: cache.drop(identity)))
    if is_http(parameters.name.bundle):
        last.append(HttpHomeSource(parameters))
    else:
        try:
            path = bundle_path(parameters.name.bundle) / parameters.file
        except BundleError as error:
            raise LoadError(str(error)) from error
        is_remote = is_network(type_of(path)) if home_is_remote is None else home_is_remote
        (last if is_remote else first).append(DiskSource(path, parameters.nbytes, is_remote=is_remote))
    return [*first, *(PeerSource(url, token, parameters) for url in peers), *last]
