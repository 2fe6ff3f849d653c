"""Limits and use from files as kernels write them, and from this machine's own."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from keystage.keysmanager import memory
from keystage.keysmanager.memory import MemoryUnreadable

MIB = 1 << 20
MEMINFO = """MemTotal:       16384 kB
MemFree:         4096 kB
MemAvailable:    9999 kB
Buffers:          512 kB
Cached:          6144 kB
Shmem:           2048 kB
SReclaimable:     256 kB
HugePages_Total:       3
HugePages_Free:        2
HugePages_Rsvd:        1
Hugepagesize:       2048 kB
Hugetlb:         {hugetlb} kB
"""


class Machine:
    """Folders like `/proc` and `/sys/fs/cgroup`."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.meminfo(0)
        self.own("0::/\n")

    def meminfo(self, hugetlb: int) -> None:
        (self.proc / "meminfo").write_text(MEMINFO.format(hugetlb=hugetlb))

    def own(self, text: str) -> None:
        (self.proc / "self" / "cgroup").write_text(text)

    def group2(self, path: str, limit: str, used: int = 0, high: str = "max", cache: int = 0) -> None:
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        (self.cgroup / "cgroup.controllers").write_text("cpu memory\n")
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.high").write_text(high + "\n")
        stat = (
            f"anon {used}\nfile {cache}\nshmem 1\ninactive_anon {used // 2}\nactive_anon {used - used // 2}\n"
            f"inactive_file {cache}\nactive_file 0\nunevictable 0\n"
        )
        (folder / "memory.stat").write_text(stat)

    def group1(self, path: str, limit: int, used: int) -> None:
        folder = self.cgroup / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text(
            f"cache 7\nactive_anon 1\ninactive_anon 1\nunevictable 1\ntotal_cache 99\n"
            f"total_active_anon {used - 3}\ntotal_inactive_anon 1\ntotal_unevictable 2\n"
        )

    def read(self, configured: int | None = None, segments: int = 0) -> tuple[str, int, int, int]:
        found = memory.read(configured, segment_bytes=segments, proc=self.proc, cgroup=self.cgroup)
        return found.origin, found.limit_bytes, found.used_bytes, found.budget_bytes


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_host_counts_shared_memory_and_no_page_cache(machine: Machine) -> None:
    # 16384 - 4096 free - 512 buffers - (6144 cached - 2048 shared) - 256 slab
    assert machine.read() == ("host", 16 * MIB, 7424 * 1024, int(16 * MIB * 0.85))


def test_free_pages_in_the_lists_of_cpus_are_not_in_use(machine: Machine) -> None:
    zone = "Node 0, zone   Normal\n  pages free 9\n    cpu: {}\n        count:    {}\n        high:     5\n"
    (machine.proc / "zoneinfo").write_text(zone.format(0, 100) + zone.format(1, 28))
    assert machine.read()[2] == 7424 * 1024 - 128 * 4096
    (machine.proc / "zoneinfo").write_text(zone.format(0, "many"))
    with pytest.raises(MemoryUnreadable, match=r"zoneinfo: count should be a number, found \['many'\]"):
        machine.read()


def test_the_pool_of_huge_pages_is_apart(machine: Machine) -> None:
    machine.meminfo(6144)
    origin, limit, used, _ = machine.read()
    assert (origin, limit, used) == ("host", 10 * MIB, 1280 * 1024)
    found = memory.read(proc=machine.proc, cgroup=machine.cgroup)
    assert found.huge_free_bytes == 2 * MIB  # one of the two free ones is reserved


def test_cgroup2_own_group_and_page_cache_not_counted(machine: Machine) -> None:
    machine.own("0::/pod/app\n")
    machine.group2("pod", "max")
    machine.group2("pod/app", str(4 * MIB), used=1 * MIB, cache=3 * MIB)
    assert machine.read() == ("cgroup2", 4 * MIB, 1 * MIB, int(4 * MIB * 0.85))


def test_cgroup2_a_parent_with_less_room_counts_with_its_own_use(machine: Machine) -> None:
    machine.own("0::/pod/app\n")
    machine.group2("pod", str(6 * MIB), used=5 * MIB)
    machine.group2("pod/app", str(4 * MIB), used=1 * MIB)
    assert machine.read()[:3] == ("cgroup2", 6 * MIB, 5 * MIB)


def test_cgroup2_memory_high_throttles_before_memory_max(machine: Machine) -> None:
    machine.own("0::/app\n")
    machine.group2("app", str(4 * MIB), used=0, high=str(2 * MIB))
    assert machine.read()[:2] == ("cgroup2", 2 * MIB)


def test_cgroup2_path_of_the_host_within_a_container(machine: Machine) -> None:
    machine.own("0::/kubepods/pod-1/container\n")
    machine.group2("", str(3 * MIB), used=MIB)
    assert machine.read()[:3] == ("cgroup2", 3 * MIB, MIB)
    machine.own("0::/../other\n")
    assert machine.read()[:3] == ("cgroup2", 3 * MIB, MIB)


def test_cgroup1_with_its_parents_beside_an_empty_unified_mount(machine: Machine) -> None:
    (machine.cgroup / "unified").mkdir()
    (machine.cgroup / "unified" / "cgroup.controllers").write_text("\n")
    machine.own("4:cpu,memory:/docker/1\n0::/\n")
    machine.group1("", 0x7FFFFFFFFFFFF000, 9 * MIB)
    machine.group1("docker", 5 * MIB, 4 * MIB)
    machine.group1("docker/1", 3 * MIB, 1 * MIB)
    assert machine.read()[:3] == ("cgroup1", 5 * MIB, 4 * MIB)


def test_no_limit_anywhere_is_the_host(machine: Machine) -> None:
    machine.group2("", "max")
    assert machine.read()[0] == "host"


def test_configured_is_a_limit_for_segments(machine: Machine) -> None:
    machine.group2("", str(1 * MIB), used=MIB)
    assert machine.read(10 * MIB, segments=3 * MIB) == ("configured", 10 * MIB, 3 * MIB, int(8.5 * MIB))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cgroup/memory.max", "lots\n", r"memory\.max: expected bytes or `max`, found 'lots'"),
        ("cgroup/memory.max", "-1\n", r"memory\.max: expected bytes"),
        ("cgroup/memory.max", "\udcff", r"memory\.max: expected bytes"),
        ("cgroup/memory.stat", "active_anon 1\n", r"memory\.stat: no line inactive_anon"),
        ("cgroup/memory.stat", "active_anon x\n", r"memory\.stat: active_anon should be a number, found 'x'"),
        ("proc/meminfo", "", r"meminfo: no line MemTotal"),
        ("proc/self/cgroup", "nonsense\n", r"cgroup: expected `number:controllers:path`, found 'nonsense'"),
    ],
)
def test_what_cannot_be_understood_is_named(
    machine: Machine, tmp_path: Path, name: str, content: str, message: str
) -> None:
    machine.group2("", str(4 * MIB))
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(MemoryUnreadable, match=message):
        machine.read()


def test_a_missing_file_is_named(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    with pytest.raises(MemoryUnreadable, match="meminfo: No such file"):
        machine.read()


def test_this_machine_and_shared_memory_on_it() -> None:
    nbytes = 256 * MIB
    fd = os.memfd_create("memory-test")
    try:
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as mapped:
            for offset in range(0, nbytes, mmap.PAGESIZE):
                mapped[offset] = 1
        found = memory.read()
    finally:
        os.close(fd)
    # Others come and go, but what is written here counts.
    assert nbytes < found.used_bytes < found.limit_bytes
    assert found.budget_bytes == int(found.limit_bytes * 0.85)
