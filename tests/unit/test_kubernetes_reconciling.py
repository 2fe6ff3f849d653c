"""Parts of the reconciler that remember: expectations, failures, wishes, statuses, jobs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from keystage.controller.domain.decision import Site
from keystage.kubernetes.act import deleted
from keystage.kubernetes.api import FunctionStatus
from keystage.kubernetes.backoff import Backoff
from keystage.kubernetes.errors import ClusterError, NotFound
from keystage.kubernetes.expected import Expected, merged
from keystage.kubernetes.function_status import is_urgent, status_of, status_patch
from keystage.kubernetes.gather import Gatherer, Objects
from keystage.kubernetes.jobs import Jobs
from keystage.kubernetes.manifests import Settings
from keystage.kubernetes.wishes import Wished, Wishes


def thing(version: int, uid: str = "u", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "x", "uid": uid, "resourceVersion": str(version)}, **more}


# ------------------------------------------------------------ expected


def test_a_change_is_seen_from_when_it_is_sent_until_the_informer_shows_it() -> None:
    expected = Expected()
    sent = thing(5, phase="sent")
    expected.send("x", sent)
    assert expected.merge({"x": thing(5)}, 0.0) == {"x": sent}
    assert expected.merge({"x": thing(6)}, 0.0) == {"x": sent}  # somebody else's change came first
    answered = thing(8, phase="answered")
    expected.done("x", answered, 1.0)
    assert expected.merge({"x": thing(7)}, 1.0) == {"x": answered}
    assert expected.merge({"x": thing(9)}, 1.0) == {"x": thing(9)}
    assert expected.merge({"x": thing(7)}, 1.0) == {"x": thing(7)}  # it is forgotten


def test_what_failed_is_not_expected_and_nothing_is_for_ever() -> None:
    expected = Expected()
    expected.send("x", thing(5))
    expected.failed("x")
    assert expected.merge({}, 0.0) == {}
    expected.send("x", thing(5))
    expected.done("x", thing(6), 1.0)
    assert expected.merge({}, 5.9) == {"x": thing(6)}
    assert expected.merge({}, 6.0) == {}


def test_an_object_of_the_same_name_is_another_one() -> None:
    expected = Expected()
    expected.send("x", thing(5, uid="old"))
    assert expected.merge({"x": thing(3, uid="new")}, 0.0) == {"x": thing(3, uid="new")}


def test_a_deletion_is_expected_until_it_shows() -> None:
    expected, going = Expected(), deleted(thing(5), 0.0)
    expected.send("x", going)
    expected.done("x", None, 0.0)
    assert expected.merge({"x": thing(5)}, 1.0) == {"x": going}
    assert expected.merge({"x": thing(6)}, 1.0) == {"x": going}
    assert expected.merge({}, 1.0) == {}
    assert expected.merge({"x": thing(7)}, 1.0) == {"x": thing(7)}


def test_what_is_deleted_before_it_ever_showed_is_not_taken_for_new_when_it_shows() -> None:
    expected, going = Expected(), deleted(thing(5), 0.0)
    expected.send("x", {"metadata": {"name": "x"}})
    expected.done("x", thing(5), 0.0)
    assert expected.merge({}, 0.0) == {"x": thing(5)}
    expected.send("x", going)
    assert expected.merge({}, 0.0) == {"x": going}
    expected.done("x", None, 0.0)
    assert expected.merge({}, 1.0) == {"x": going}
    assert expected.merge({"x": thing(5)}, 1.0) == {"x": going}
    assert expected.merge({"x": thing(6)}, 1.0) == {"x": going}
    assert expected.merge({}, 1.0) == {}
    expected.send("x", {"metadata": {"name": "x"}})
    expected.send("x", going)
    expected.done("x", None, 1.0)
    assert expected.merge({}, 5.9) == {"x": going}
    assert expected.merge({}, 6.0) == {}  # it never will


def test_a_merge_patch_changes_a_copy() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(before, {"a": {"b": None, "e": 3}, "d": [2]}) == {"a": {"c": 2, "e": 3}, "d": [2]}
    assert before == {"a": {"b": 1, "c": 2}, "d": [1]}


# ------------------------------------------------------------ back-off


def test_failures_in_a_row_put_off_the_next_start_longer_and_longer() -> None:
    backoff = Backoff()
    assert backoff.hold_until_s("f") == 0.0
    holds = []
    for at_s in (100.0, 101.0, 102.0, 104.0):
        backoff.failed("f", at_s)
        holds.append(backoff.hold_until_s("f") - at_s)
    assert holds == [0.0, 0.5, 1.0, 2.0]
    backoff.failed("f", 140.0)  # after a while of health
    assert backoff.hold_until_s("f") == 140.0
    backoff.keep_only({"g"})
    assert backoff.hold_until_s("f") == 0.0


# ------------------------------------------------------------ wishes


def test_every_new_wish_calls_back_and_one_that_says_the_same_does_not() -> None:
    calls: list[int] = []
    wishes = Wishes(lambda: calls.append(1))
    wishes.set_replicas("f", 2, [Site("a"), Site("b")], ["f-1"], 5.0)
    wishes.set_replicas("f", 2, [Site("a"), Site("b")], ["f-1"], 5.0)
    wishes.key_stages("p", [1, 0])
    wishes.key_stages("p", [1, 0])
    assert len(calls) == 2
    wish = wishes.read().functions["f"]
    assert (wish.replicas, wish.sites, wish.victims) == (2, (Site("a"), Site("b")), ("f-1",))
    assert wishes.read().key_stages == {"p": (1, 0)}


def test_sites_are_used_once_and_cores_are_forgotten_alone() -> None:
    wishes = Wishes()
    wishes.set_replicas("f", 2, [Site("a"), Site("b")])
    wishes.set_cores("f", 2.0)
    wishes.use_sites("f", 1)
    assert wishes.read().functions["f"].sites == (Site("b"),)
    wishes.forget("f", cores=True)
    assert (wishes.read().functions["f"].cores, wishes.read().functions["f"].replicas) == (None, 2)


def test_wishes_about_a_function_that_was_removed_do_not_reach_its_successor() -> None:
    wishes = Wishes()
    wishes.set_replicas("f", 5)
    wishes.set_replicas("g", 1)
    wishes.bind({"f": "first", "g": "g"})
    assert wishes.read().functions["f"].replicas == 5
    wishes.bind({"f": "second", "g": "g"})
    assert set(wishes.read().functions) == {"g"}


def test_lifting_and_waking_are_done_once() -> None:
    wishes = Wishes()
    wishes.lift_override("f")
    wishes.clear_wake("f")
    wishes.done("f", lifted=True)
    wish = wishes.read().functions["f"]
    assert (wish.is_lifting, wish.is_awake) == (False, True)


# ------------------------------------------------------------ status


def replica(name: str, node: str = "n1", *, is_ready: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(is_ready)}]},
    }


def test_a_status_counts_what_stays_and_removes_what_is_not_said_any_longer() -> None:
    leaving = replica("c", is_ready=True)
    leaving["metadata"]["deletionTimestamp"] = "2026-07-01T12:00:00Z"
    status = status_of(
        {"metadata": {"name": "f", "generation": 4}},
        desired=None,
        cores=None,
        template="t",
        pods=[
            replica("a", is_ready=True),
            replica("b", is_ready=False),
            leaving,
            replica("d", "n2", is_ready=True),
        ],
        lost={"n2"},
        trouble=["no", "no"],
    )
    assert status == FunctionStatus(
        replicas=2,
        ready=1,
        selector="keystage.dev/function=f",
        template="t",
        trouble=["no"],
        observedGeneration=4,
    )
    patch = status_patch(status)["status"]
    assert patch["desired"] is None
    assert patch["cores"] is None
    zero = status_patch(FunctionStatus())["status"]
    assert (zero["replicas"], zero["ready"], zero["trouble"]) == (0, 0, None)


def test_words_alone_are_not_urgent() -> None:
    assert not is_urgent(FunctionStatus(ready=1), FunctionStatus(ready=1, trouble=["x"]))
    assert is_urgent(FunctionStatus(ready=1), FunctionStatus(ready=2))


# ------------------------------------------------------------ jobs


def test_outcomes_are_taken_by_the_thread_that_collects() -> None:
    woken = threading.Semaphore(0)
    jobs = Jobs(2, "test", woken.release)
    outcomes: list[Any] = []
    threads: list[int] = []

    def done(outcome: Any) -> None:
        outcomes.append(outcome)
        threads.append(threading.get_ident())

    def fail() -> int:
        raise NotFound("gone", 404)

    gate = threading.Event()
    jobs.submit("hangs", lambda: gate.wait(10.0), done)
    jobs.submit("fails", fail, done)
    assert woken.acquire(timeout=10.0)
    jobs.collect()
    assert isinstance(outcomes[0], ClusterError)
    assert jobs.busy() == {"hangs"}
    gate.set()
    assert woken.acquire(timeout=10.0)
    assert jobs.is_busy("hangs")
    jobs.collect()
    assert outcomes[1] is True
    assert set(threads) == {threading.get_ident()}
    jobs.stop()


def test_what_runs_when_it_stops_is_waited_for_but_not_for_ever() -> None:
    jobs, gate, ended = Jobs(2, "test", lambda: None), threading.Event(), threading.Event()
    begun = threading.Semaphore(0)

    def work(until: threading.Event) -> None:
        begun.release()
        until.wait(10.0)
        ended.set()

    jobs.submit("ends", lambda: work(gate), lambda _: None)
    assert begun.acquire(timeout=10.0)
    jobs.stop(0.01)
    assert not ended.is_set()
    threading.Timer(0.05, gate.set).start()
    jobs.stop(10.0)
    assert ended.is_set()


def test_a_bug_in_a_job_is_raised_where_it_is_collected() -> None:
    woken = threading.Semaphore(0)
    jobs = Jobs(1, "test", woken.release)
    jobs.submit("bug", lambda: 1 // 0, lambda _: None)
    assert woken.acquire(timeout=10.0)
    with pytest.raises(ZeroDivisionError):
        jobs.collect()
    jobs.stop()


# ------------------------------------------------------------ gathering


def on_gpu(parameter_bytes: int | None) -> Any:
    """A scene with one stage on a GPU, whose parameters are of this size."""
    env = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": "0", "KEYSTAGE_DEVICE": "cuda"}
    function = {"metadata": {"name": "f", "uid": "u"}, "spec": {"image": "i", "envVars": env}}
    ready = [{"type": "Ready", "status": "True"}]
    status = {"conditions": ready, "allocatable": {"keystage.dev/gpu0": "80", "keystage.dev/gpu1": "40"}}
    nodes = {
        "n1": {"metadata": {"name": "n1"}, "status": status},
        "n2": {
            "metadata": {"name": "n2"},
            "status": {**status, "conditions": []},
            "spec": {"unschedulable": True},
        },
    }
    holding = {
        "metadata": {"name": "other"},
        "spec": {"nodeName": "n1", "containers": [{"resources": {"limits": {"keystage.dev/gpu0": "30"}}}]},
    }
    objects = Objects(functions={"f": function}, pods={}, nodes=nodes, deployments={}, others={"x": holding})
    settings = Settings(namespace="a", function_namespace="b")
    gatherer = Gatherer(settings, lambda _: parameter_bytes, Backoff())
    return gatherer.gather(objects, Wished({}, {}), 100.0).scene


def test_a_stage_on_a_gpu_waits_until_its_size_is_known() -> None:
    function = on_gpu(None).functions["f"]
    assert function.hold_until_s == float("inf")
    assert function.shape == ""
    function = on_gpu(2 << 30).functions["f"]
    assert function.hold_until_s == 0.0
    assert function.gpu_gib == 4  # 2 of parameters, 0.5 of KV, 1.5 to run
    assert function.template == on_gpu(None).functions["f"].template


def test_free_memory_of_gpus_is_what_no_pod_asks_for() -> None:
    nodes = on_gpu(1).nodes
    assert nodes["n1"].gpu_gib == {0: 50.0, 1: 40.0}
    assert (nodes["n1"].is_open, nodes["n2"].is_open) == (True, False)
