"""Pod UIDs in cgroup paths: drivers, versions, namespaces, nested kubelets, and what is no pod."""

from __future__ import annotations

import pytest

from keystage.keysmanager.pod_identity import uid_in

UID = "3f1c2d4e-0a1b-4c2d-8e3f-001122334455"
ESCAPED = UID.replace("-", "_")
OUTER = "99999999-0a1b-4c2d-8e3f-001122334455"
STATIC = "0123456789abcdef0123456789abcdef"
DAEMON = "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podaaaa.slice/cri-1.scope\n"
V1_DAEMON = "4:memory:/kubepods/besteffort/podaaaa/c0\n1:name=systemd:/kubepods/besteffort/podaaaa/c0\n0::/\n"


@pytest.mark.parametrize(
    ("cgroups", "own"),
    [
        # Version 2, systemd driver: burstable, guaranteed.
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{ESCAPED}.slice/cri-c.scope\n",
            DAEMON,
        ),
        (f"0::/kubepods.slice/kubepods-pod{ESCAPED}.slice/cri-containerd-c.scope\n", DAEMON),
        # Version 2, cgroupfs driver.
        (f"0::/kubepods/burstable/pod{UID}/c1\n", "0::/kubepods/besteffort/podaaaa/c0\n"),
        # Version 2, read from within a cgroup namespace: siblings, another class, guaranteed.
        (f"0::/../../kubepods-besteffort-pod{ESCAPED}.slice/cri-c.scope\n", "0::/\n"),
        (f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{ESCAPED}.slice/c.scope\n", "0::/\n"),
        (f"0::/../../pod{UID}/c1\n", "0::/\n"),
        # Version 1: all hierarchies tell the same, some tell nothing.
        (
            f"9:pids:/kubepods/pod{UID}/c1\n4:memory:/kubepods/pod{UID}/c1\n2:cpuset:/\n0::/\n",
            V1_DAEMON,
        ),
        # The kubelet has a root of its own, under either driver.
        (f"0::/node1/kubepods/burstable/pod{UID}/c1\n", "0::/node1/kubepods/besteffort/podaaaa/c0\n"),
        (
            f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{ESCAPED}.slice/c.scope\n",
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podaaaa.slice/d.scope\n",
        ),
        # The kubelet runs in a pod of another cluster: its own pods count, not the one it is in.
        (
            f"0::/kubepods/burstable/pod{OUTER}/node/kubelet/kubepods/burstable/pod{UID}/c1\n",
            f"0::/kubepods/burstable/pod{OUTER}/node/kubelet/kubepods/besteffort/podaaaa/c0\n",
        ),
        # Or in a container.
        (f"0::/docker/abc/kubelet/kubepods/pod{UID}/c1\n", "0::/docker/abc/kubelet/kubepods/podaaaa/c0\n"),
        # A container that makes cgroups of its own, named as another pod's.
        (f"0::/kubepods/burstable/pod{UID}/c1/kubepods/pod{OUTER}/x\n", DAEMON),
        (f"0::/../../kubepods-pod{ESCAPED}.slice/c.scope/pod{OUTER}\n", "0::/\n"),
    ],
)
def test_a_pod_is_told_by_its_cgroup(cgroups: str, own: str) -> None:
    assert uid_in(cgroups, own) == UID


def test_a_pod_from_a_file_has_a_uid_without_dashes() -> None:
    assert uid_in(f"0::/kubepods/burstable/pod{STATIC}/c1\n", DAEMON) == STATIC


@pytest.mark.parametrize(
    "cgroups",
    [
        "",
        "0::/\n",
        "0::/user.slice/user-0.slice/session-1.scope\n",
        "0::/system.slice/podman.service\n",
        "0::/kubepods/burstable/podnothing/c1\n",
        f"0::/kubepods/burstable/{UID}/c1\n",
        f"0::/kubepods/burstable/xpod{UID}/c1\n",
        f"0::/kubepods/burstable/pod{UID}x/c1\n",
        # Hierarchies of version 1 that contradict each other prove nothing.
        f"9:pids:/kubepods/pod{UID}/c1\n4:memory:/kubepods/pod{OUTER}/c1\n",
        "no cgroup file\n",
    ],
)
def test_what_is_in_no_pod_has_none(cgroups: str) -> None:
    assert uid_in(cgroups, "0::/\n") is None
