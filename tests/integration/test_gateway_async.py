"""Asynchronous calls through a whole gateway, with its queue in memory."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from support.async_world import AsyncWorld, run_async_world

FAST = {"KEYSTAGE_ASYNC_RETRY_S": "0.05", "KEYSTAGE_ASYNC_ATTEMPTS": "3"}


def test_a_call_is_accepted_run_and_answered_to_its_callback(tmp_path: Path) -> None:
    async def work(w: AsyncWorld) -> None:
        await w.deploy("job")
        hook = f"{w.receiver_url}/hook?token=s3cret"
        status, text, headers = await w.post(
            "job.openfaas-fn/a/b?x=1&y=2", b"\x00\xffbody", X_Call_Id="mine", X_Callback_Url=hook, X_Thing="ü"
        )
        assert (status, text, headers["x-call-id"]) == (202, "", "mine")
        await w.until(lambda: w.callbacks, "callback")
        path, got, body = w.callbacks[0]
        assert path == "/hook?token=s3cret"
        assert body == b"|".join([b"\x00\xffbody", b"/a/b", b"x=1&y=2", "ü".encode()])
        told = {k: v for k, v in got.items() if k.startswith("x-") or k == "content-type"}
        assert 0 < float(told.pop("x-duration-seconds")) < 30
        assert told == {
            "content-type": "text/x-told",
            "x-call-id": "mine",
            "x-function-name": "job",
            "x-function-status": "200",
            "x-start-time": headers["x-start-time"],
        }
        _, _, headers = await w.post("job", b"")
        assert len(headers["x-call-id"]) == 32
        await w.until(lambda: w.ran() == {"mine": 1, headers["x-call-id"]: 1}, "second call")
        counted = 'gateway_function_invocation_total{code="200",function_name="job.openfaas-fn"} 2.0'
        metrics = await w.metrics()
        for _ in range(500):  # the function has run; its answer may still be on its way
            if counted in metrics:
                break
            await asyncio.sleep(0.02)
            metrics = await w.metrics()
        assert counted in metrics
        assert 'keystage_async_accepted_total{function_name="job.openfaas-fn"} 2.0' in metrics
        age_s = re.search(r"^keystage_view_age_seconds ([0-9.e-]+)$", metrics, re.MULTILINE)
        assert age_s is not None
        assert 0 <= float(age_s[1]) < 30
        # Receivers that are busy are asked again; what they refuse for good, or redirect, is not.
        w.callbacks.clear()
        w.answers = [503, 429, 200]
        await w.post("job/status/418", b"", X_Callback_Url=hook)
        await w.until(lambda: len(w.callbacks) == 3, "third try of the callback")
        assert [c[1]["x-function-status"] for c in w.callbacks] == ["418"] * 3
        w.callbacks.clear()
        w.answers = [302]
        await w.post("job", b"", X_Callback_Url=hook)
        await w.until(lambda: "callback at" in (w.world.home.logs / "_gateway.log").read_text(), "given up")
        assert len(w.callbacks) == 1
        log = (w.world.home.logs / "_gateway.log").read_text()
        assert "s3cret" not in log
        assert "given up: status 302" in log

    run_async_world(tmp_path, work, **FAST)


def test_what_cannot_be_accepted_says_why(tmp_path: Path) -> None:
    async def work(w: AsyncWorld) -> None:
        await w.deploy("job")
        for path, body, headers, status, said in [
            ("none", b"", {}, 404, "function none is not deployed"),
            ("job.elsewhere", b"", {}, 404, "job.elsewhere"),
            ("job", b"x" * 1001, {}, 413, "at most 1000"),
            ("job", b"", {"X_Callback_Url": "ftp://a"}, 400, "X-Callback-Url"),
            ("job", b"", {"X_Callback_Url": "http://b.example/"}, 400, "KEYSTAGE_CALLBACK_HOSTS"),
            ("job", b"", {"X_Call_Id": "x" * 129}, 400, "X-Call-Id"),
        ]:
            got, text, _ = await w.post(path, body, **headers)
            assert (got, said in text) == (status, True), (path, headers, got, text)

        async def pieces() -> object:
            for _ in range(11):
                yield b"x" * 100

        async with w.session.post("/async-function/job", data=pieces()) as answer:
            assert (answer.status, "at most 1000" in await answer.text()) == (413, True)
        for method in ("GET", "PUT", "DELETE"):
            async with w.session.request(method, "/async-function/job") as answer:
                assert (answer.status, answer.headers["allow"]) == (405, "POST")
        # Two run, one waits: that is all that the queue takes of one function.
        for _ in range(3):
            assert (await w.post("job/slow?s=1"))[0] == 202
        status, text, got_headers = await w.post("job/slow?s=1")
        assert (status, got_headers["retry-after"], "KEYSTAGE_ASYNC_ENTRIES" in text) == (429, "5", True)
        await w.until(lambda: len(w.ran()) == 2, "two calls run")
        metrics = await w.metrics()
        assert 'keystage_async_refused_total{reason="429"} 1.0' in metrics
        assert 'keystage_async_in_flight_calls{function_name="job.openfaas-fn"} 2.0' in metrics

    settings = {"ENTRIES": "3", "PER_FUNCTION": "2", "BODY_BYTES": "1000", "DRAIN_S": "0.1"}
    env = {f"KEYSTAGE_ASYNC_{key}": value for key, value in settings.items()}
    run_async_world(tmp_path, work, **env, KEYSTAGE_CALLBACK_HOSTS="127.0.0.1, a.example")


@pytest.mark.slow
def test_failures_are_tried_again_and_the_last_one_is_told(tmp_path: Path) -> None:
    async def work(w: AsyncWorld) -> None:
        await w.deploy("job", "gone")
        await w.post("job/status/500", b"", X_Call_Id="five", X_Callback_Url=w.receiver_url)
        await w.until(lambda: w.callbacks, "callback")
        await w.post("job/status/404", b"", X_Call_Id="four", X_Callback_Url=w.receiver_url)
        await w.until(lambda: len(w.callbacks) == 2, "second callback")
        assert [c[1]["x-function-status"] for c in w.callbacks] == ["500", "404"]
        assert w.ran() == {"five": 3, "four": 1}
        # A function without replicas (nobody wakes it here), and one that is removed meanwhile.
        await w.world.scale("gone", 0)
        await w.until(lambda: not w.world.replicas("gone"), "no replica")
        await w.post("gone", b"", X_Callback_Url=w.receiver_url)
        await w.until(lambda: len(w.callbacks) == 3, "third callback")
        assert w.callbacks[2][1]["x-function-status"] == "503"
        assert b"no ready replica" in w.callbacks[2][2]
        await w.post("gone", b"", X_Callback_Url=w.receiver_url)
        await w.world.remove("gone")
        await w.until(lambda: len(w.callbacks) == 4, "fourth callback")
        assert b"gone is not deployed" in w.callbacks[3][2]
        log = (w.world.home.logs / "_gateway.log").read_text()
        assert "call 'five' is given up: 3 attempts failed, the last with status 500" in log
        metrics = await w.metrics()
        assert 'keystage_async_dead_letters_total{function_name="job.openfaas-fn"} 1.0' in metrics
        assert 'keystage_async_retries_total{function_name="job.openfaas-fn"} 2.0' in metrics

    run_async_world(tmp_path, work, **FAST, KEYSTAGE_WAKE_S="0.3")


@pytest.mark.slow
def test_an_answer_too_large_for_the_callback_is_an_answer_all_the_same(tmp_path: Path) -> None:
    async def work(w: AsyncWorld) -> None:
        await w.deploy("job")
        body = b"x" * 2000
        await w.post("job", body, X_Call_Id="once", X_Callback_Url=w.receiver_url)
        await w.until(lambda: w.callbacks, "callback")
        await w.post("job/status/500", body, X_Call_Id="failing", X_Callback_Url=w.receiver_url)
        await w.until(lambda: len(w.callbacks) == 2, "second callback")
        for _, headers, text in w.callbacks:
            assert headers["x-function-status"] == "502"
            assert re.match(rb"the answer has 20\d\d bytes, at most 1000 are passed", text)
        # The function's own status decides whether it runs again, and is what is counted.
        assert w.ran() == {"once": 1, "failing": 3}
        metrics = await w.metrics()
        for code, count in (("200", 1), ("500", 3)):
            line = f'gateway_function_invocation_total{{code="{code}",function_name="job.openfaas-fn"}}'
            assert f"{line} {count}.0" in metrics
        assert 'code="502"' not in metrics
        assert 'keystage_async_dead_letters_total{function_name="job.openfaas-fn"} 1.0' in metrics
        log = (w.world.home.logs / "_gateway.log").read_text()
        assert "call 'once' answered with status 200; its body is dropped: the answer has 20" in log
        assert "call 'once' is given up" not in log
        assert "call 'failing' is given up: 3 attempts failed, the last with status 500" in log

    run_async_world(tmp_path, work, **FAST, KEYSTAGE_ASYNC_ANSWER_BYTES="1000")


@pytest.mark.slow
def test_a_function_at_zero_is_woken_and_holds_up_no_other(tmp_path: Path) -> None:
    async def work(w: AsyncWorld) -> None:
        await w.deploy("job", "zero")
        await w.world.scale("zero", 0)
        await w.until(lambda: not w.world.replicas("zero"), "no replica")
        waiting = [f"z{n}" for n in range(20)]
        for call_id in waiting:
            assert (await w.post("zero", b"", X_Call_Id=call_id))[0] == 202
        await w.until(lambda: w.world.function("zero").wake, "wake")
        for number in range(30):
            await w.post("job", b"", X_Call_Id=f"j{number}")
        await w.until(lambda: len(w.ran()) == 30, "the other function's calls")
        assert not w.ran("zero")
        await w.world.scale("zero", 1)
        await w.until(lambda: len(w.ran("zero")) == 20, "the woken function's calls")
        assert w.ran("zero") == dict.fromkeys(waiting, 1)

    # The sleeping function alone may take every slot there is.
    env = {"KEYSTAGE_ASYNC_PER_FUNCTION": "4", "KEYSTAGE_ASYNC_IN_FLIGHT": "4"}
    run_async_world(tmp_path, work, **env)


@pytest.mark.slow
def test_a_thousand_calls_run_once_each_and_a_stop_waits_for_what_runs(tmp_path: Path) -> None:
    async def work(w: AsyncWorld) -> None:
        await w.deploy("job")
        ids = [f"c{number}" for number in range(1000)]
        assert not await w.flood(ids, "job")
        await w.until(lambda: len(w.ran()) == 1000, "all calls")
        assert w.ran() == dict.fromkeys(ids, 1)
        await w.post("job/slow?s=0.5", b"", X_Call_Id="last", X_Callback_Url=w.receiver_url)
        await w.until(lambda: "last" in w.ran(), "the last call begins")
        assert w.world.gateway is not None
        process = w.world.gateway.process
        assert process is not None
        process.terminate()
        await w.until(lambda: w.callbacks, "callback of the call that ran when the gateway was stopped")
        assert w.ran()["last"] == 1

    run_async_world(tmp_path, work)
