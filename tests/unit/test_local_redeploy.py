"""A function that is redeployed before anybody decided its number keeps one replica, not two."""

from __future__ import annotations

import pytest

from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.state import PolicyState
from keystage.controller.platforms.local_cap import Machine
from keystage.controller.platforms.local_view import Seen, snapshot_of
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings
from keystage.local.api import Deployment, FunctionRecord, ReplicaRecord, ReplicaState

T = 1_000_000.0


def replica(number: int, generation: int, state: ReplicaState) -> ReplicaRecord:
    return ReplicaRecord(
        replica=f"f-{number}",
        function="f",
        generation=generation,
        state=state,
        pid=number,
        address="",
        started_at_s=T - 1,
    )


@pytest.mark.parametrize(
    ("desired", "replicas", "decided"),
    [
        (None, [replica(0, 1, "ready"), replica(1, 2, "starting")], 1),
        (None, [replica(0, 1, "ready"), replica(1, 2, "ready")], 1),
        (None, [replica(0, 1, "ready")], 1),
        (None, [replica(0, 2, "ready"), replica(1, 2, "ready"), replica(2, 2, "starting")], 3),
        (2, [replica(0, 1, "ready"), replica(1, 1, "ready"), replica(2, 2, "starting")], 2),
    ],
)
def test_replicas_that_are_being_replaced_do_not_count_as_wanted(
    desired: int | None, replicas: list[ReplicaRecord], decided: int
) -> None:
    record = FunctionRecord(
        deployment=Deployment(service="f"), created_at_s=T - 9, desired=desired, generation=2
    )
    seen = Seen(
        at_s=T,
        functions=[record],
        replicas=replicas,
        stats={},
        unread={},
        bundles={},
        machine=Machine(2, 1 << 30),
        tells_load=True,
    )
    decision = decide(PolicySettings(), snapshot_of(seen), PolicyState())
    stated = [a.replicas for a in decision.actions if isinstance(a, SetReplicas)]
    assert stated in ([decided], [] if desired == decided else [decided])
