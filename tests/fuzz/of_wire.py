"""Targets of the wire: messages, addresses, secrets, trace headers, tensors, what stages hand on."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any, get_args

import msgspec

from fuzz.target import UNREADABLE, FuzzError, Ready


def _example(kind: Any) -> Any:
    """A value of a type, as plain as it can be."""
    info = msgspec.inspect.type_info(kind)
    return _made(info)


def _made(info: Any) -> Any:
    match info:
        case msgspec.inspect.IntType():
            return 3
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.StrType():
            return "tcp://127.0.0.1:4000"
        case msgspec.inspect.BytesType():
            return b"abc"
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return [_made(info.item_type)] * 2
        case msgspec.inspect.TupleType():
            return [_made(item) for item in info.item_types]
        case msgspec.inspect.LiteralType():
            return info.values[0]
        case msgspec.inspect.UnionType():
            return _made(next(t for t in info.types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.StructType():
            fields = [_made(field.type) for field in info.fields]
            return [info.tag, *fields] if info.tag is not None else fields
        case msgspec.inspect.DictType():
            return {"a": _made(info.value_type)}
        case _:
            return None


def _messages(decode: Any, encode: Any, union: Any) -> Ready:
    def run(data: bytes) -> None:
        message = decode(data)
        if decode(encode(message)) != message and b"\x7f\xf8" not in data:
            again = encode(decode(encode(message)))
            if again != encode(message):  # equal bytes: it holds not-a-number
                raise FuzzError(f"{message!r} changes on its way")

    seeds = [msgspec.msgpack.encode(_example(kind)) for kind in get_args(union)]
    return Ready(run, (msgspec.DecodeError,), tuple(seeds))


def from_worker(scratch: Path) -> Ready:
    """What a router receives."""
    from keystage.wire import api

    return _messages(api.decode_from_worker, api.encode, api.FromWorker)


def to_worker(scratch: Path) -> Ready:
    """What a worker receives."""
    from keystage.wire import api

    return _messages(api.decode_to_worker, api.encode, api.ToWorker)


def addresses(scratch: Path) -> Ready:
    """Names of processes, and what they are made into again."""
    from keystage.wire.address import join_host, parse, split_host
    from keystage.wire.errors import WireError

    def run(data: bytes) -> None:
        found = parse(data.decode("utf-8", "surrogateescape"))
        if parse(found.text) != found:
            raise FuzzError(f"{found} is written {found.text!r}")
        for place in filter(None, (found.tcp, found.tensors)):
            host, port = split_host(place)
            join_host(host, port)

    seeds = (
        b"ipc:///run/a.sock",
        b"tcp://127.0.0.1:4000",
        b"ipc:///run/a#tcp=h:1&tensors=[::1]:2&node=abc",
        b"tcp://[::1]:65535",
    )
    return Ready(run, (WireError,), seeds)


def endpoints(scratch: Path) -> Ready:
    """`KEYSTAGE_HTTP`."""
    from keystage.wire.endpoints import EndpointError, listen

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape").replace("\0", "")  # as an environment has it
        host = text.rpartition(":")[0].strip("[]")
        if not text.startswith("fd://") and any(c.isalnum() and c not in "0123456789" for c in host):
            return  # a name would be looked up
        sock = listen(text)
        if text.startswith("fd://"):
            sock.detach()
        else:
            sock.close()

    return Ready(run, (EndpointError,), (b"127.0.0.1:0", b"fd://900", b"[::1]:0", b":0"))


def mailbox(scratch: Path) -> Ready:
    """Frames that arrive at an inbox, as a router reads them: sender, zero byte, body."""
    import zmq

    from keystage.wire.api import Ready as Message
    from keystage.wire.api import decode_from_worker, encode
    from keystage.wire.mailbox import Mailbox

    context = zmq.Context()
    inbox = Mailbox(f"ipc://{scratch}/m", context)
    outbox = context.socket(zmq.PUSH)
    outbox.connect(f"ipc://{scratch}/m")

    def run(data: bytes) -> None:
        outbox.send_multipart([data[:5000], *([data[5000:]] if len(data) > 5000 else [])])
        if not inbox.wait(10):
            raise FuzzError("a frame did not arrive")
        for sender, body, _ in inbox.drain():
            inbox.unreachable(sender)
            inbox.is_near(sender)
            with contextlib.suppress(msgspec.DecodeError):
                decode_from_worker(body)
            if "\0" in sender:
                raise FuzzError("a zero byte in a name")

    seeds = (
        b"ipc:///a\0" + encode(Message("w")),
        b"tcp://127.0.0.1:9\0" + encode(Message("w")),
        b"no zero",
        b"\0",
    )
    return Ready(run, (), seeds)


def tensor_stream(scratch: Path) -> Ready:
    """Both ends of a tensor connection, against a peer that says what the input says."""
    from keystage.wire.api import TensorRef
    from keystage.wire.errors import PeerError
    from keystage.wire.link import Link
    from keystage.wire.secret import Secret
    from keystage.wire.tensor_fetch import Arrival, Fetcher, check_size
    from keystage.wire.tensor_stream import OPENING, REPLY, greet, welcome

    link = Link("n", Secret(b"s" * 32), is_plain=True)
    fetcher = Fetcher.__new__(Fetcher)
    fetcher._spare = []

    def run(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[1:])
            theirs.shutdown(socket.SHUT_WR)
            kind = data[0] % 3 if data else 0
            # A socket of this family has no options of TCP.
            if kind == 2:
                ref = TensorRef("uint8", (8,), 1, 1, 0, 8, 1)
                if check_size(ref) is not None:
                    raise FuzzError("a size that is right")
                fetcher._receive(ours, Arrival(ref))
            else:
                (greet, welcome)[kind](ours, link, "peer")

    opening = OPENING.pack(b"KSTN", 1, b"n" * 32)
    seeds = (
        b"\0" + opening + b"p" * 32,
        b"\1" + opening + b"p" * 32,
        b"\2" + REPLY.pack(0, 8) + b"12345678",
        b"\2" + REPLY.pack(1, 3) + b"why",
        b"\2" + REPLY.pack(1, 1 << 60),
        b"\2" + REPLY.pack(0, 1 << 60),
    )
    return Ready(run, (PeerError, OSError), seeds)


def tensor_sizes(scratch: Path) -> Ready:
    """What a message says of a tensor, before memory is taken for it."""
    from keystage.wire.api import TensorRef
    from keystage.wire.tensor_fetch import MAX_TENSOR_BYTES, check_size

    decoder = msgspec.msgpack.Decoder(TensorRef)

    def run(data: bytes) -> None:
        ref = decoder.decode(data)
        if check_size(ref) is None and ref.nbytes > MAX_TENSOR_BYTES:
            raise FuzzError("a tensor above the bound")

    ref = TensorRef("float32", (2, 3), 1, 2, 64, 24, 5)
    return Ready(run, UNREADABLE, (msgspec.msgpack.encode(ref),))


def rings(scratch: Path) -> Ready:
    """References into shared memory that name other processes, descriptors, places."""
    from keystage.wire.api import TensorRef
    from keystage.wire.ring import PeerRings, Ring, RingError

    ring = Ring(1 << 16)
    decoder = msgspec.msgpack.Decoder(TensorRef)
    good = ring.write(memoryview(b"12345678"), "uint8", (8,))
    assert good is not None
    peers = PeerRings()

    def run(data: bytes) -> None:
        ref = decoder.decode(data)
        view = peers.view(ref, "")
        if len(view) != ref.nbytes:
            raise FuzzError(f"{len(view)} bytes for {ref.nbytes}")
        if ref.pid != os.getpid() and ref.fd == good.fd:
            peers.forget("")

    return Ready(run, (RingError, *UNREADABLE), (msgspec.msgpack.encode(good),))


def secret_files(scratch: Path) -> Ready:
    """The deployment's secret, as a file may hold it."""
    from keystage.wire.errors import WireError
    from keystage.wire.secret import read_secret

    file = scratch / "secret"
    file.touch(0o600)

    def run(data: bytes) -> None:
        file.write_bytes(data)
        read_secret(file).derive("label")

    return Ready(run, (WireError,), (b"a" * 64 + b"\n", b"a" * 31, b"a" * 4097))


def traceparent(scratch: Path) -> Ready:
    """The header by which traces go on."""
    from keystage.wire.traceparent import parse, written

    def run(data: bytes) -> None:
        found = parse(data)
        if found is not None and parse(written(found)) != found:
            raise FuzzError(f"{found} is written {written(found)!r}")

    form = b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01"
    return Ready(run, (), (form, b"cc" + form[2:] + b"-more", b"ff" + form[2:], b" " + form + b"\t"))


def packed_messages(scratch: Path) -> Ready:
    """What modules of a stream program hand on: header, layout, tensors."""
    import torch

    from keystage.streams.api import Message, ProgramError
    from keystage.worker.messages import pack, unpack

    torch.set_num_threads(1)
    message = Message(
        {"request": 1, "step": 2}, {"x": torch.arange(6.0).view(2, 3), "y": torch.ones(1, dtype=torch.int64)}
    )
    (first,) = pack("m", [message])
    assert not isinstance(first, ProgramError)
    meta, block = first

    def run(data: bytes) -> None:
        found = unpack(data, block)
        if sum(tensor.numel() * tensor.itemsize for tensor in found.data.values()) > 64 * len(
            bytes(block or b"")
        ):
            raise FuzzError("more elements than bytes")

    return Ready(run, (ProgramError,), (meta,))


def otlp(scratch: Path) -> Ready:
    """Settings of traces: OpenTelemetry's variables and ours."""
    from pydantic import ValidationError

    from keystage.wire.config import TraceConfig

    def run(data: bytes) -> None:
        given = msgspec.json.decode(data, type=dict[str, str])
        config = TraceConfig(**{key: value.replace("\0", "") for key, value in given.items()})
        for made in (config.url, config.headers, config.resource, config.ratio):
            if callable(made):
                made()

    names = [str(field.validation_alias) for field in TraceConfig.model_fields.values()]
    good = {
        "KEYSTAGE_TRACES": "on",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=b,c=%20d",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.5",
        "OTEL_RESOURCE_ATTRIBUTES": "k=v",
    }
    seeds = (msgspec.json.encode(good), msgspec.json.encode(dict.fromkeys(names, "x")))
    return Ready(run, (ValidationError, *UNREADABLE), seeds)
