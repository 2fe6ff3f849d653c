"""A deployment's secret is replaced under running processes: nothing is lost, and the old one ends."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import get, wait_for
from support.wire_nodes import NodesFunction, ready_stages, stats

from keystage.keysmanager.pod_api import TOKEN_PURPOSE
from keystage.wire import api
from keystage.wire.address import Address
from keystage.wire.api import TensorRef
from keystage.wire.bearer import INTERNAL, bearer_from
from keystage.wire.keyring import Keyring
from keystage.wire.link import Link
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import Ring, RingError
from keystage.wire.secret import Secret, create_secret, read_secret
from keystage.wire.sources import TensorSources
from keystage.wire.tensor_server import TensorServer


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


class KeyFile:
    """A key file, and the three steps in which its secret is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        create_secret(path)
        self.old = path.read_text().strip()
        self.new = secrets.token_hex(32)

    def write(self, *lines: str) -> None:
        """Replaces the file as a whole, as an editor or the kubelet does."""
        other = self.path.with_suffix(".other")
        other.write_text("\n".join(lines) + "\n")
        other.chmod(0o600)
        other.replace(self.path)

    @property
    def steps(self) -> list[tuple[str, ...]]:
        return [(self.old, self.new), (self.new, self.old), (self.new,)]


def link(node: str, file: Path, *, plain: bool = False) -> Link:
    keyring = Keyring(file)
    return Link(node, keyring.secrets[0], "127.0.0.1", is_plain=plain, keyring=keyring)


def has_read(one: Link, lines: tuple[str, ...]) -> bool:
    assert one.keyring is not None
    return one.keyring.secrets == tuple(Secret(line.encode()) for line in lines)


class Receiving:
    """A thread that reads a mailbox, as an engine does."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.numbers: dict[str, list[int]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.mailbox.wait(0.1)
            for sender, body, _ in self.mailbox.drain():
                message = api.decode_to_worker(body)
                assert isinstance(message, api.Ack)
                self.numbers.setdefault(sender, []).extend(message.slots)

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(30)
        self.mailbox.close()


class Sending:
    """A thread that sends 0, 1, 2, ... until it is told to end."""

    def __init__(self, mailbox: Mailbox, to: str) -> None:
        self.mailbox = mailbox
        self.sent = 0
        self._to = to
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.0005):
            assert not list(self.mailbox.drain())  # where a changed secret is taken over
            assert self.mailbox.send(self._to, api.Ack([self.sent]))
            self.sent += 1

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(30)


@pytest.mark.slow
def test_messages_come_whole_and_in_order_while_the_secret_is_replaced(folder: Path) -> None:
    key = KeyFile(folder / "key")
    a, b, c = (link(node, key.path) for node in "abc")
    inbox = Mailbox(f"ipc://{folder}/a", link=a)
    received = Receiving(inbox)
    senders = [
        Sending(Mailbox(f"ipc://{folder}/{name}", link=at), inbox.address)
        for name, at in (("b", b), ("c", c))
    ]
    names = [sender.mailbox.address for sender in senders]

    def count() -> int:
        return min(len(received.numbers.get(name, ())) for name in names)

    wait_for(lambda: count() > 50, "messages with the old secret")
    for lines in key.steps:
        key.write(*lines)
        wait_for(lambda lines=lines: all(has_read(one, lines) for one in (a, b, c)), "the file was read")
        seen = count()
        wait_for(lambda seen=seen: count() > seen + 300, "messages after it")
    for sender in senders:
        sender.end()
    wait_for(lambda: count() >= min(sender.sent for sender in senders), "the last message")
    wait_for(lambda: sum(map(len, received.numbers.values())) >= sum(s.sent for s in senders), "all")
    for sender, name in zip(senders, names, strict=True):
        assert received.numbers[name] == list(range(sender.sent))
        sender.mailbox.close()
    received.end()


@pytest.mark.slow
def test_a_peer_that_keeps_the_old_secret_is_heard_during_the_overlap_and_cut_off_after_it(
    folder: Path,
) -> None:
    key = KeyFile(folder / "key")
    a = link("a", key.path)
    inbox = Mailbox(f"ipc://{folder}/a", link=a)
    received = Receiving(inbox)
    old = Mailbox(f"ipc://{folder}/old", link=Link("o", Secret(key.old.encode()), "127.0.0.1"))

    def heard(sender: Mailbox, number: int) -> bool:
        return number in received.numbers.get(sender.address, ())

    for number, lines in enumerate([(key.old,), *key.steps[:2]]):
        key.write(*lines)
        wait_for(lambda lines=lines: has_read(a, lines), "the file was read")
        old.send(inbox.address, api.Ack([number]))
        wait_for(lambda number=number: heard(old, number), "the old peer")
        # Who comes anew during the overlap gets in with either secret.
        for line in lines:
            late = Mailbox(f"ipc://{folder}/late", link=Link("l", Secret(line.encode()), "127.0.0.1"))
            late.send(inbox.address, api.Ack([100 + number]))
            wait_for(lambda late=late, number=number: heard(late, 100 + number), "a new peer")
            late.close()
    key.write(key.new)
    wait_for(lambda: has_read(a, (key.new,)), "the file was read")
    wait_for(lambda: inbox.refused, "the old peer is refused")
    old.send(inbox.address, api.Ack([999]))
    new = Mailbox(f"ipc://{folder}/new", link=Link("n", Secret(key.new.encode()), "127.0.0.1"))
    new.send(inbox.address, api.Ack([1000]))
    wait_for(lambda: heard(new, 1000), "a peer with the new secret")
    refused = inbox.refused
    wait_for(lambda: inbox.refused > refused, "it tries again in vain")
    assert not heard(old, 999)
    for box in (old, new):
        box.close()
    received.end()


def test_what_waits_for_a_peer_that_is_away_reaches_it_after_the_secret_was_replaced(folder: Path) -> None:
    key = KeyFile(folder / "key")
    b = link("b", key.path)
    place = Mailbox(f"ipc://{folder}/place", link=link("a", key.path))
    address = place.address
    tcp = address.rpartition("tcp=")[2].partition("&")[0]
    place.close()
    sender = Mailbox(f"ipc://{folder}/b", link=b)
    sender.send(f"tcp://{tcp}", api.Ack([1]))
    for lines in key.steps[:2]:
        key.write(*lines)
        wait_for(lambda lines=lines: has_read(b, lines), "the file was read")
        assert not list(sender.drain())
        assert not sender.wait(0.0)  # nothing is left that would wake it again and again
    sender.send(f"tcp://{tcp}", api.Ack([2]))
    received = Receiving(Mailbox(f"tcp://{tcp}", link=link("a", key.path), is_named=True))
    wait_for(lambda: received.numbers.get(sender.address) == [1, 2], "both messages, in order")
    sender.close()
    received.end()


class Producer:
    """A ring and its tensor server on node `p`."""

    def __init__(self, at: Link) -> None:
        self.ring = Ring(1 << 20)
        self.server = TensorServer(self.ring, at)
        self.name = Address("/nowhere", "127.0.0.1:1", self.server.address, "p").text

    def fetched(self, sources: TensorSources) -> bool:
        """Whether a tensor gets to a consumer."""
        data = os.urandom(5000)
        ref = self.ring.write(memoryview(data), "uint8", (len(data),))
        assert isinstance(ref, TensorRef)
        ready: list[bool] = []
        assert sources.begin([ref], [self.name], lambda: ready.append(True))
        wait_for(lambda: (sources.poll(), ready)[1], "an answer")
        try:
            return bytes(sources.view(ref, self.name)) == data
        except RingError:
            return False
        finally:
            sources.release(ref, self.name)
            self.ring.ledger.give_back(ref.slot)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["tls", "plain"])
def test_tensors_are_fetched_at_every_step_and_by_no_old_consumer_after_the_last(
    folder: Path, plain: bool
) -> None:
    key = KeyFile(folder / "key")
    p, c = (link(node, key.path, plain=plain) for node in "pc")
    producer = Producer(p)
    consumer = TensorSources(c)
    old = TensorSources(Link("o", Secret(key.old.encode()), "127.0.0.1", is_plain=plain))
    new = TensorSources(Link("n", Secret(key.new.encode()), "127.0.0.1", is_plain=plain))
    assert producer.fetched(consumer)
    assert producer.fetched(old)
    assert not producer.fetched(new)
    for lines in key.steps:
        key.write(*lines)
        # Either reads the file first: for a while they differ by one step.
        wait_for(lambda lines=lines: has_read(p, lines), "the producer has read the file")
        assert producer.fetched(consumer)
        wait_for(lambda lines=lines: has_read(c, lines), "the consumer has read the file")
        assert producer.fetched(consumer)
        assert producer.fetched(new)
        assert producer.fetched(old) == (key.old in lines)
    assert not producer.fetched(old)
    for sources in (consumer, old, new):
        sources.forget(producer.name)
    producer.server.close()


def test_tokens_of_internal_http_change_with_the_secret(folder: Path) -> None:
    assert INTERNAL == TOKEN_PURPOSE
    key = KeyFile(folder / "key")
    shown = bearer_from(None, key.path)
    before = shown.current
    assert shown.admits(f"Bearer {before}".encode())
    for lines in key.steps:
        key.write(*lines)
        first = Secret(lines[0].encode()).derive("kubernetes internal http").hex()
        wait_for(lambda first=first: shown.current == first, "the token to be shown")
        if len(lines) == 1:
            wait_for(lambda: not shown.admits(f"Bearer {before}".encode()), "the end of the old token")
        else:
            assert shown.admits(f"Bearer {before}".encode())
    assert not shown.admits(b"")
    assert not shown.admits(b"Bearer ")
    assert not bearer_from(None, None).admits(b"Bearer ")


def test_a_file_that_is_no_secret_leaves_the_old_one_in_use(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = KeyFile(folder / "key")
    keyring = Keyring(key.path)
    before = keyring.secrets
    for content, named in (
        ("short", "holds 5 bytes"),
        (f"{key.old}\nshort", "line 2 of"),
        (f"{key.old}\n{key.new}\n{'x' * 40}", "holds 3 secrets"),
    ):
        key.write(*content.split("\n"))
        keyring.look()
        assert keyring.secrets == before
        assert named in caplog.text
    key.write(key.new)
    key.path.chmod(0o644)
    keyring.look()
    assert keyring.secrets == before
    key.path.unlink()
    keyring.look()
    assert keyring.secrets == before
    key.write(key.new)
    keyring.look()
    assert keyring.secrets == (read_secret(key.path),)
    assert keyring.secrets != before
    for value in (key.old, key.new, "short"):
        assert value not in caplog.text


@pytest.mark.slow
def test_requests_go_on_over_two_nodes_while_the_secret_is_replaced(folder: Path) -> None:
    function = NodesFunction(folder, "single-pass", 2)
    key = KeyFile(folder / "key")
    log = folder / "log"
    # The function's own file is written, under the path that its processes were told.
    function.key_file.write_text(key.old)
    key.path = function.key_file
    told = ("sh", "-c", f'exec "$0" "$@" 2>>{log}')
    stop = threading.Event()
    wrong: list[tuple[int, bytes]] = []
    served = [0]

    def ask(url: str) -> None:
        while not stop.is_set():
            item = os.urandom(70_000)
            status, body = get(f"{url}/", item)
            if (status, body) != (200, item):
                wrong.append((status, body[:200]))
            served[0] += 1

    try:
        _, url = function.on("a", "router", "router", prefix=told)  # type: ignore[arg-type]
        for stage, node in enumerate("bc"):
            function.on(node, "worker", f"w{stage}", prefix=told, KEYSTAGE_STAGES=str(stage))  # type: ignore[arg-type]
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
        with ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                pool.submit(ask, url)
            try:
                for number, lines in enumerate(key.steps, 1):
                    key.write(*lines)
                    wait_for(
                        lambda n=number: log.read_text().count("uses the secret") == 3 * n, f"step {number}"
                    )
                    seen = served[0]
                    wait_for(lambda seen=seen: served[0] > seen + 20, "requests after it")
            finally:
                stop.set()
        assert wrong == []
        # A worker with the old key never gets in; one with the new key does.
        (folder / "old.key").write_text(key.old)
        (folder / "old.key").chmod(0o600)
        function.on(
            "d", "worker", "stale", KEYSTAGE_STAGES="0", KEYSTAGE_WIRE_KEY_FILE=str(folder / "old.key")
        )
        function.on("e", "worker", "fresh", KEYSTAGE_STAGES="0")
        wait_for(lambda: "fresh" in {r.replica for r in stats(url).replicas}, "the new worker")
        wait_for(lambda: "is not ours" in log.read_text(), "the refusal in the router's log")
        assert "stale" not in {r.replica for r in stats(url).replicas}
        assert key.old not in log.read_text()
        assert key.new not in log.read_text()
    finally:
        function.stop()


def test_a_secrets_fingerprint_says_nothing_about_it() -> None:
    one, other = Secret(b"a" * 32), Secret(b"b" * 32)
    assert one.fingerprint != other.fingerprint
    assert len(one.fingerprint) == 8
    assert one.fingerprint not in (b"a" * 32).hex()
