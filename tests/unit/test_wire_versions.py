"""Parts of different builds talk: versions are negotiated, messages of the build before are read, and those
of a later one as far as they are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from keystage.bundle.api import emulated
from keystage.router.admission import AdmissionBounds
from keystage.router.node import RouterNode
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.opening import open_router
from keystage.wire.ring import Ring
from keystage.wire.versions import Versions, common, differ, spoken
from keystage.worker.engine import Engine
from keystage.worker.executor import EmulatedDevice, EmulatedExecutor
from keystage.worker.settings import EngineSettings, Status

REF = api.TensorRef("float32", (2, 3), 77, 5, 64, 24, 9)
SPEC = api.SessionSpec(4, 1, 2, [1, 2, 3], 3, 8, [0], 0.5, 0.9, 11, b"in", 2, 1, True)
ROWS = api.StepRows([4], [1], [0], [3], [True], [11], [0.5], [0.9], [11], [3])
STREAM = api.StreamMessage("left", b"meta", REF, "ipc://a", b"body", "text/plain", 3)

BEFORE: tuple[tuple[api.Message, str], ...] = (
    # Made by the build before `Hello.newest`, `Introduce.newest`, `Bye.reason` and `TensorRef.crc`.
    (
        api.Hello(2, "p", (0, 1), "w", "id", "cpu", 16, 512, 64, "ipc://w", 9, "boot", True, 100, 2),
        "dc0010a548656c6c6f02a170920001a177a26964a363707510cd020040a76970633a2f2f7709a4626f6f74c36402",
    ),
    (
        api.Ready("w"),
        "92a55265616479a177",
    ),
    (
        api.Credit("w", 4, 512),
        "94a6437265646974a17704cd0200",
    ),
    (
        api.Parked("w", 0, [7], [1], [REF], 0.5, 0.25),
        (
            "98a65061726b6564a17700910791019198a7666c6f617433329202034d05401809c400cb3fe0000000000000cb"
            "3fd0000000000000"
        ),
    ),
    (
        api.Results("w", 1, [7], [1], "float32", [(2, 3)], [b"out"], 0.5, 0.25),
        (
            "9aa7526573756c7473a1770191079101a7666c6f617433329192020391c4036f7574cb3fe0000000000000cb3f"
            "d0000000000000"
        ),
    ),
    (
        api.Ran("w", 1, [3], [[STREAM]], [api.Fault("company", "why", 503)], 2, 0.5, 0.25),
        (
            "99a352616ea177019103919197a46c656674c4046d65746198a7666c6f617433329202034d05401809c400a769"
            "70633a2f2f61c404626f6479aa746578742f706c61696e039193a7636f6d70616e79a3776879cd01f702cb3fe0"
            "000000000000cb3fd0000000000000"
        ),
    ),
    (
        api.Tokens("w", 2, [7], [1], [5], [42], [0.5]),
        "98a6546f6b656e73a17702910791019105912a91cb3fe0000000000000",
    ),
    (
        api.Failed("w", [7], [1], "why", True),
        "96a64661696c6564a17791079101a3776879c3",
    ),
    (
        api.Handed(7, 1, 32),
        "94a648616e646564070120",
    ),
    (
        api.Heartbeat("w", "ready", 3, 48, [0.5], [6], [18], 32, 29, 1),
        "9ba9486561727462656174a177a57265616479033091cb3fe000000000000091069112201d01",
    ),
    (
        api.Draining("w"),
        "92a8447261696e696e67a177",
    ),
    (
        api.Bye("w"),
        "92a3427965a177",
    ),
    (
        api.Introduce(2, 100, 1),
        "94a9496e74726f64756365026401",
    ),
    (
        api.Route(2, ["w", "v"], ["ipc://w", "ipc://v"], 2, 32),
        "96a5526f7574650292a177a17692a76970633a2f2f77a76970633a2f2f760220",
    ),
    (
        api.Unroute([2], ["ipc://v"]),
        "93a7556e726f757465910291a76970633a2f2f76",
    ),
    (
        api.Start([SPEC]),
        "92a55374617274919e0401029301020303089100cb3fe0000000000000cb3feccccccccccccd0bc402696e0201c3",
    ),
    (
        api.Move([SPEC]),
        "92a44d6f7665919e0401029301020303089100cb3fe0000000000000cb3feccccccccccccd0bc402696e0201c3",
    ),
    (
        api.Work(0, 1, [7], [1], "uint8", [(3,)], [b"in!"], True),
        "99a4576f726b000191079101a575696e743891910391c403696e21c3",
    ),
    (
        api.Fetch(1, 1, [7], [1], [REF], ["ipc://w"], False),
        "98a546657463680101910791019198a7666c6f617433329202034d05401809c40091a76970633a2f2f77c2",
    ),
    (
        api.Run(1, [3], [7], [1], [[STREAM]]),
        (
            "96a352756e01910391079101919197a46c656674c4046d65746198a7666c6f617433329202034d05401809c400"
            "a76970633a2f2f61c404626f6479aa746578742f706c61696e03"
        ),
    ),
    (
        api.Evict([7], [1], [-1]),
        "94a545766963749107910191ff",
    ),
    (
        api.Cancel([7], [1]),
        "93a643616e63656c91079101",
    ),
    (
        api.Release([7], [1]),
        "93a752656c6561736591079101",
    ),
    (
        api.Drain(2.5),
        "92a5447261696ecb4004000000000000",
    ),
    (
        api.Hand(7, 1, 0, "ipc://v", 64),
        "96a448616e64070100a76970633a2f2f7640",
    ),
    (
        api.KvState(7, 1, 0, "ipc://r", "ipc://w", 32, 64, REF),
        "99a74b765374617465070100a76970633a2f2f72a76970633a2f2f77204098a7666c6f617433329202034d05401809c400",
    ),
    (
        api.Step(
            2,
            3,
            1,
            "ipc://r",
            ["w", "v"],
            ["ipc://w", "ipc://v"],
            "ipc://w",
            ROWS,
            [],
            REF,
            [6],
            [1],
            [5],
            9,
            8,
            4,
            2,
            [0.5],
        ),
        (
            "dc0013a453746570020301a76970633a2f2f7292a177a17692a76970633a2f2f77a76970633a2f2f76a7697063"
            "3a2f2f779a910491019100910391c3910b91cb3fe000000000000091cb3feccccccccccccd910b91039098a766"
            "6c6f617433329202034d05401809c4009106910191050908040291cb3fe0000000000000"
        ),
    ),
    (
        api.Ack([9], 1),
        "93a341636b910901",
    ),
)
"""Messages, and their bytes as the build before this one wrote them."""


def reads(message: api.Message, body: bytes) -> api.Message:
    if isinstance(message, get_args(api.FromWorker)):
        return api.decode_from_worker(body)
    return api.decode_to_worker(body)


def test_there_are_bytes_of_every_kind_of_message() -> None:
    kinds = {*get_args(api.FromWorker), *get_args(api.ToWorker)}
    assert {type(message) for message, _ in BEFORE} == kinds


@pytest.mark.parametrize(("message", "bytes_of_before"), BEFORE, ids=lambda value: type(value).__name__)
def test_messages_of_the_build_before_are_read(message: api.Message, bytes_of_before: str) -> None:
    assert reads(message, bytes.fromhex(bytes_of_before)) == message


@pytest.mark.parametrize(("message", "bytes_of_before"), BEFORE, ids=lambda value: type(value).__name__)
def test_the_build_before_reads_what_is_written_now(message: api.Message, bytes_of_before: str) -> None:
    """Fields are appended only: what it knows stands where it looks, what it does not know behind that."""
    now, before = (
        msgspec.msgpack.decode(api.encode(message)),
        msgspec.msgpack.decode(bytes.fromhex(bytes_of_before)),
    )
    assert begins_with(now, before)


def begins_with(now: Any, before: Any) -> bool:
    """Whether arrays have the same values in the same places, nested ones too, as far as the older go."""
    if isinstance(before, list) and isinstance(now, list):
        return len(now) >= len(before) and all(map(begins_with, now, before))
    return bool(now == before)


@pytest.mark.parametrize(("message", "_"), BEFORE, ids=lambda value: type(value).__name__)
def test_fields_of_a_later_build_are_passed_over(message: api.Message, _: str) -> None:
    later = [*msgspec.msgpack.decode(api.encode(message)), "later", {"more": [1]}]
    assert reads(message, msgspec.msgpack.encode(later)) == message


def test_a_kind_of_a_later_build_is_refused_and_no_more() -> None:
    with pytest.raises(msgspec.DecodeError):
        api.decode_from_worker(msgspec.msgpack.encode(["Later", 1, 2]))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((2, 2), (2, 0), 2),
        ((2, 2), (2, 3), 2),
        ((2, 3), (2, 2), 2),
        ((2, 3), (3, 4), 3),
        ((2, 3), (2, 3), 3),
        ((2, 2), (1, 0), None),
        ((2, 2), (3, 4), None),
        ((3, 4), (1, 2), None),
    ],
)
def test_the_highest_common_version_is_spoken(
    ours: tuple[int, int], theirs: tuple[int, int], expected: int | None
) -> None:
    assert common(Versions(*ours), spoken(*theirs)) == expected


def test_two_that_have_none_in_common_are_named_with_what_each_speaks() -> None:
    said = differ("w1", spoken(4, 6), "this router", Versions(2, 3))
    assert said == "w1 speaks wire versions 4 to 6, this router versions 2 to 3: upgrade the older one"
    assert differ("w1", spoken(1, 0), "this router", Versions(2, 2)).startswith("w1 speaks wire version 1, ")


def hello(least: int, newest: int) -> api.Hello:
    return api.Hello(
        least, "e", (0,), f"w-{least}-{newest}", "emulated-e-0", "emulated", 4, 0, 4, "ipc:///n", 1,
        "else", False, newest=newest,
    )  # fmt: skip


def test_a_router_takes_workers_with_a_version_in_common_and_names_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = emulated("e", 1, execution="single-pass")
    node = RouterNode(
        pipeline, open_router(f"ipc://{tmp_path}/r"), AdmissionBounds(), EventLog(None, "r"), 1 << 20
    )
    least, most = api.VERSIONS.least, api.VERSIONS.most
    for number, told in enumerate(((most, 0), (least, most + 1), (most + 1, most + 2), (least - 1, 0))):
        node._handle(f"ipc://{tmp_path}/w{number}", hello(*told), 0.0)
    taken = {worker.hello.replica for worker in node.fleet.workers.values()}
    node._mailbox.close()
    assert taken == {f"w-{most}-0", f"w-{least}-{most + 1}"}
    assert (
        f"w-{most + 1}-{most + 2} speaks wire versions {most + 1} to {most + 2}, this router" in caplog.text
    )
    assert f"w-{least - 1}-0 speaks wire version {least - 1}, this router" in caplog.text


class Asked:
    """A mailbox that keeps what an engine says."""

    address = "ipc:///w"
    refused = 0

    def __init__(self) -> None:
        self.sent: list[api.Message] = []

    def send(self, to: str, message: api.Message, payload: memoryview | None = None) -> bool:
        self.sent.append(message)
        return True


@pytest.mark.parametrize(
    ("told", "answers"),
    [
        ((api.VERSIONS.most, 0), True),
        ((api.VERSIONS.least, api.VERSIONS.most + 3), True),
        ((api.VERSIONS.most + 1, api.VERSIONS.most + 2), False),
        ((api.VERSIONS.least - 1, 0), False),
    ],
)
def test_a_worker_answers_a_router_with_a_version_in_common(
    told: tuple[int, int], answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = emulated("e", 1, execution="single-pass")
    settings = EngineSettings("w", (0,), ("ipc:///r",), "b", "emulated", 4, 0, 4, 4, 1.0, "n", 1)
    mailbox: Any = Asked()
    ring = Ring(4096)
    engine = Engine(
        settings,
        pipeline,
        EmulatedExecutor(EmulatedDevice(), 1, 8, 16),
        mailbox,
        ring,
        EventLog(None, "w"),
        Status(),
    )
    engine._handle("ipc:///r", api.Introduce(told[0], 1, 0, told[1]), None)
    hellos = [message for message in mailbox.sent if isinstance(message, api.Hello)]
    assert bool(hellos) is answers
    if answers:
        assert (hellos[0].wire, hellos[0].newest) == (api.VERSIONS.least, api.VERSIONS.most)
    else:
        assert f"router ipc:///r speaks wire {spoken(*told).text}, this worker" in caplog.text
    ring.close()
