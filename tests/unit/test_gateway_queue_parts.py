"""The asynchronous queue's pure parts: slots, bounds, back-off, addresses, the stored form of a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.gateway.backend import BadRequest
from keystage.gateway.queue import Bounds, Call, QueueFull, decode, encode
from keystage.gateway.queue_address import CallbackRules
from keystage.gateway.queue_backoff import Backoff
from keystage.gateway.queue_slots import Slots
from keystage.wire.redis_address import check_redis, shown


def test_slots_are_shared_and_nobody_is_shut_out() -> None:
    slots = Slots(per_function=4, in_all=8)
    assert slots.room(["a"]) == {"a": 4}
    assert slots.room(["a", "b", "c"]) == {"a": 3, "b": 3, "c": 2}
    for _ in range(4):
        slots.begin("a")
        slots.begin("b")
    assert slots.room(["a", "b"]) == {}
    # All eight are taken, and yet a function that runs nothing may begin one.
    assert slots.room(["a", "c", "d"]) == {"c": 1, "d": 1}
    slots.begin("c")
    assert slots.room(["c", "d"]) == {"d": 1}
    slots.end("a")
    slots.end("a")
    assert slots.room(["a", "c"]) == {"c": 1}
    assert slots.running() == {"a": 2, "b": 4, "c": 1}
    slots.end("c")
    assert slots.running() == {"a": 2, "b": 4}


@given(st.lists(st.sampled_from("abcdef"), max_size=60), st.integers(1, 5), st.integers(1, 12))
def test_room_never_exceeds_the_bounds(begun: list[str], per_function: int, in_all: int) -> None:
    slots = Slots(per_function, in_all)
    for function in begun:
        if slots.room([function]):
            slots.begin(function)
    running = slots.running()
    room = slots.room("abcdef")
    assert all(running.get(f, 0) + n <= per_function for f, n in room.items())
    beyond = [f for f in room if f not in running]
    assert sum(room.values()) <= max(0, in_all - sum(running.values())) + len(beyond)
    assert set(beyond) == set("abcdef") - set(running)


def test_bounds_name_themselves_and_leave_room_for_others() -> None:
    bounds = Bounds(entries=3, size_bytes=100)
    bounds.check("f", calls=2, own_bytes=40, all_bytes=40, size_bytes=20)
    with pytest.raises(QueueFull, match=r"function f .*3 calls .*at most 3 .*KEYSTAGE_ASYNC_ENTRIES") as full:
        bounds.check("f", calls=3, own_bytes=0, all_bytes=0, size_bytes=1)
    assert full.value.status == 429
    with pytest.raises(QueueFull, match=r"50 of 100 bytes .*KEYSTAGE_ASYNC_BYTES"):
        bounds.check("f", calls=1, own_bytes=50, all_bytes=50, size_bytes=1)
    bounds.check("g", calls=0, own_bytes=0, all_bytes=50, size_bytes=50)


def test_backoff_doubles_to_its_cap_with_half_of_it_random() -> None:
    backoff = Backoff(attempts=9, base_s=1.0, cap_s=5.0)
    assert [backoff.delay_s(n, 1.0) for n in (1, 2, 3, 4, 5000)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.delay_s(3, 0.0) == 2.0


def test_callbacks_are_http_addresses_of_allowed_hosts() -> None:
    anywhere = CallbackRules()
    for url in ("http://a", "https://u:p@a.b:8/x?y=z", "http://[::1]:80/", "HTTP://A/b"):
        anywhere.check(url)
    for url in (
        "",
        "a",
        "/x",
        "ftp://a/b",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "http://a:b/",
        "http://a:99999/",
        "http://[::1/",
        "http://a..b:0x50/",
        "http://a/ b",
        "http://a/\r\nX: y",
        "http://\xfc/",
        "http://a/" + "x" * 3000,
    ):
        with pytest.raises(BadRequest, match="X-Callback-Url"):
            anywhere.check(url)
    rules = CallbackRules(("a.example", "*.b.example", "c.example:8080"))
    for url in ("http://a.example", "https://A.example:9/x", "http://x.b.example/", "http://c.example:8080/"):
        rules.check(url)
    for url in (
        "http://b.example",
        "http://evil-b.example",
        "http://c.example",
        "http://a.example@evil.example/",
        "http://169.254.169.254/",
    ):
        with pytest.raises(BadRequest, match="KEYSTAGE_CALLBACK_HOSTS"):
            rules.check(url)


def test_messages_hold_neither_passwords_nor_paths() -> None:
    assert shown("redis://u:secret@h:7/3") == "redis://h:7"
    assert shown("https://u:secret@h/hook/token?key=secret") == "https://h:443"
    assert shown("unix:///run/redis.sock?password=secret") == "unix:///run/redis.sock"
    for url in ("http://h:secret/", "http://[secret/"):
        with pytest.raises(BadRequest) as refused:
            CallbackRules().check(url)
        assert "secret" not in str(refused.value)


def test_addresses_of_redis() -> None:
    for url in ("redis://h", "redis://:p@h:6379/2", "rediss://u:p@h/0", "unix:///run/redis.sock?db=1"):
        check_redis(url)
    for url in ("", "h:6379", "http://h", "redis://", "redis://h:x", "redis://h/secret", "unix://"):
        with pytest.raises(ValueError, match="expected redis://") as refused:
            check_redis(url)
        assert "secret" not in str(refused.value)


@given(st.binary(max_size=200), st.text(max_size=30), st.integers(0, 9))
def test_a_stored_call_is_the_call(body: bytes, value: str, attempts: int) -> None:
    call = Call(
        key="k", id="i", function="f", path="/x", headers=[("a", value)], body=body, attempts=attempts
    )
    assert decode(encode(call)) == call


@given(st.binary(max_size=60))
def test_what_is_no_call_is_told_so(payload: bytes) -> None:
    with pytest.raises(ValueError, match="are no call"):
        decode(payload)
