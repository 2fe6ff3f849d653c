"""How much host memory there is for us and how much of it is in use, read from the kernel.

`daemon` reads it about once a second and tells the ledger (`MemorySeen`). The first of these that
limits us counts, with the use on that same level:

    cgroup v2   min(memory.max, memory.high) of our group and of every parent
    cgroup v1   memory.limit_in_bytes likewise
    host        MemTotal without the pool of huge pages

Parents count because their other children use the same room; so of all limits on the way up, the host
included, the one with the least room left is the effective one. In use is what the kernel cannot simply
take back: anonymous, shared and unevictable memory, never page cache. The kernel's own lists give it
without counting a locked page twice: `active_anon + inactive_anon + unevictable`, where shared memory
lies on the anonymous lists. Swap is not room. This module must not decide anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from keystage.keysmanager.api import Memory
from keystage.keysmanager.budget import PAGE_BYTES

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
BUDGET_RATIO = 0.85
LIMITLESS_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest number of pages."""


class MemoryUnreadable(Exception):
    """A file of the kernel is missing or is not what it should be; names file and content."""


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One place where a limit holds.

    Attributes:
        origin: `cgroup2`, `cgroup1`, `host` or `configured`.
        limit_bytes: the limit.
        used_bytes: what counts against it.
    """

    origin: str
    limit_bytes: int
    used_bytes: int

    def left_bytes(self, budget_ratio: float) -> int:
        """Room below the budget; negative: too much is in use."""
        return int(self.limit_bytes * budget_ratio) - self.used_bytes


def read(
    configured_bytes: int | None = None,
    budget_ratio: float = BUDGET_RATIO,
    segment_bytes: int = 0,
    *,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
) -> Memory:
    """Reads limit and use.

    Args:
        configured_bytes: overrides what is found. It is then a limit for segments alone, and
            `segment_bytes` is what is in use; the operator answers for the rest of the host.
        budget_ratio: share of the limit that may be used.
        segment_bytes: what the daemon's segments take (the ledger knows), huge pages included.
        proc: where `/proc` is mounted.
        cgroup: where the cgroup file systems are mounted.

    Raises:
        MemoryUnreadable: a file cannot be read or understood.
    """
    host, huge_free_bytes = _host(proc / "meminfo", _cached_free_bytes(proc / "zoneinfo"))
    if configured_bytes is not None:
        level = Level("configured", configured_bytes, segment_bytes)
    else:
        levels = [*_cgroup2(proc, cgroup), *_cgroup1(proc, cgroup), host]
        level = min(levels, key=lambda found: found.left_bytes(budget_ratio))
    return Memory(
        limit_bytes=level.limit_bytes,
        used_bytes=level.used_bytes,
        budget_bytes=int(level.limit_bytes * budget_ratio),
        segment_bytes=segment_bytes,
        origin=level.origin,
        huge_free_bytes=huge_free_bytes,
    )


# ------------------------------------------------------------------ levels


def _host(path: Path, cached_free_bytes: int) -> tuple[Level, int]:
    """The host itself, and its free huge pages that nobody has reserved."""
    found = _pairs(path)

    def kib(name: str, default: int | None = None) -> int:
        return 1024 * _field(path, found, name, default)

    huge_bytes = kib("Hugetlb", 0)
    total = kib("MemTotal") - huge_bytes
    # Cached contains shared memory, which cannot be dropped. Reclaimable slab can.
    free = (
        cached_free_bytes
        + kib("MemFree")
        + kib("Buffers")
        + kib("Cached")
        - kib("Shmem")
        + kib("SReclaimable", 0)
    )
    pages = _field(path, found, "HugePages_Free", 0) - _field(path, found, "HugePages_Rsvd", 0)
    page_bytes = kib("Hugepagesize", 0)
    huge_free_bytes = max(0, pages) * page_bytes if page_bytes == 2 * 1024 * 1024 else 0
    return Level("host", total, max(0, total - free)), huge_free_bytes


def _cached_free_bytes(path: Path) -> int:
    """Free pages in the lists of each CPU, which `MemFree` leaves out.

    Since Linux 6.7 these lists grow to hundreds of MiB a CPU after much was freed, as when a holder ends.
    """
    if not path.exists():
        return 0
    words = [line.split() for line in _text(path).splitlines()]
    counts = [pair[1] for pair in words if len(pair) == 2 and pair[0] == "count:"]
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise MemoryUnreadable(f"{path}: count should be a number, found {counts!r:.80}")
    return sum(map(int, counts)) * PAGE_BYTES


def _cgroup2(proc: Path, mount: Path) -> Iterator[Level]:
    for root in (mount, mount / "unified"):
        if not (root / "cgroup.controllers").exists():
            continue
        for folder in _upwards(root, _own(proc / "self" / "cgroup", "")):
            limits = [_limit(folder / name) for name in ("memory.max", "memory.high")]
            limit = min((found for found in limits if found is not None), default=None)
            if limit is not None:
                yield Level("cgroup2", limit, _used(folder / "memory.stat", ""))


def _cgroup1(proc: Path, mount: Path) -> Iterator[Level]:
    root = mount / "memory"
    if not (root / "memory.limit_in_bytes").exists():
        return
    for folder in _upwards(root, _own(proc / "self" / "cgroup", "memory")):
        limit = _limit(folder / "memory.limit_in_bytes")
        if limit is not None:
            yield Level("cgroup1", limit, _used(folder / "memory.stat", "total_"))


def _own(path: Path, controller: str) -> str:
    """Our group's path within its hierarchy: of a v1 controller, or of v2 for the empty name."""
    for line in _text(path).splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            raise MemoryUnreadable(f"{path}: expected `number:controllers:path`, found {line!r}")
        if controller in parts[1].split(","):
            return parts[2]
    return "/"


def _upwards(root: Path, own: str) -> Iterator[Path]:
    """Our group's folder and its parents' up to the mount; only the mount where ours is not below it."""
    parts = [part for part in own.split("/") if part]
    # In a container without a cgroup namespace the path is the host's, and the mount is our group.
    if ".." in parts or not root.joinpath(*parts).is_dir():
        parts = []
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _limit(path: Path) -> int | None:
    """A limit in bytes, None: there is none (the root group has not even the file)."""
    if not path.exists():
        return None
    text = _text(path).strip()
    if text == "max":
        return None
    if not text.isascii() or not text.isdigit():
        raise MemoryUnreadable(f"{path}: expected bytes or `max`, found {text[:80]!r}")
    return int(text) if int(text) < LIMITLESS_BYTES else None


def _used(path: Path, prefix: str) -> int:
    found = _pairs(path)
    names = ("active_anon", "inactive_anon", "unevictable")
    return sum(_field(path, found, prefix + name) for name in names)


# ------------------------------------------------------------------ files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MemoryUnreadable(f"{path}: {error.strerror or error}") from error


def _pairs(path: Path) -> dict[str, str]:
    """First two words of each line, the first without its colon."""
    pairs = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2:
            pairs[words[0].rstrip(":")] = words[1]
    return pairs


def _field(path: Path, pairs: dict[str, str], name: str, default: int | None = None) -> int:
    text = pairs.get(name)
    if text is None:
        if default is not None:
            return default
        raise MemoryUnreadable(f"{path}: no line {name}")
    if not text.isascii() or not text.isdigit():
        raise MemoryUnreadable(f"{path}: {name} should be a number, found {text[:80]!r}")
    return int(text)
