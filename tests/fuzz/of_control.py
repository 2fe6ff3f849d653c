"""Targets of gateway, supervisor and controller: deployments, labels, queries, stored state, answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec

from fuzz.target import UNREADABLE, FuzzError, Ready

DEPLOYMENT: dict[str, Any] = {
    "service": "a-1", "image": "i", "envProcess": "sleep 1", "labels": {"com.openfaas.scale.min": "1"},
    "envVars": {"KEYSTAGE_DRAIN_S": "3", "A": "b"}, "annotations": {"com.openfaas.ready.http.path": "/x"},
    "limits": {"cpu": "500m", "memory": "1Gi"}, "requests": {"cpu": "0.1"}, "secrets": ["s"],
    "constraints": ["zone=a"],
}  # fmt: skip
STAGE: dict[str, Any] = {
    **DEPLOYMENT, "labels": {"keystage.role": "stage"},
    "envVars": {
        "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_STAGES": "0-1", "KEYSTAGE_BUNDLE": "file:///b",
        "KEYSTAGE_ROUTER": "ipc:///r",
        "KEYSTAGE_DEVICE": "cuda:0", "KEYSTAGE_THREADS": "2",
    },
}  # fmt: skip
_LABELS = {
    "com.openfaas.scale.min": "1", "com.openfaas.scale.max": "4", "com.openfaas.scale.zero": "true",
    "com.openfaas.scale.zero-duration": "15m", "com.openfaas.scale.target": "5",
    "com.openfaas.scale.type": "rps",
    "com.openfaas.scale.target-proportion": "0.7", "com.openfaas.scale.factor": "20",
}  # fmt: skip


def deployments(scratch: Path) -> Ready:
    """Bodies of the gateway's deploy call, and the rules of both worlds: local processes and Kubernetes."""
    from starlette.requests import Request

    from keystage.gateway.backend import BadRequest, TooLarge, UnknownFunction
    from keystage.gateway.names import check_name, check_namespace, check_secret_name, function_name
    from keystage.gateway.rest_body import read_body
    from keystage.gateway.types import FunctionDeployment
    from keystage.kubernetes import checks as cluster_checks
    from keystage.kubernetes import manifests
    from keystage.local import checks
    from keystage.local.api import Deployment

    loop = asyncio.new_event_loop()
    settings = manifests.Settings("keystage", "functions")

    def run(data: bytes) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        body = loop.run_until_complete(read_body(request, FunctionDeployment))
        for check in (check_name, function_name):
            check(body.service)
        check_namespace(body.namespace or "")
        for name in body.secrets or ():
            check_secret_name(name)
        deployment = msgspec.json.decode(data, type=Deployment)
        checks.check(deployment)
        checks.drain_s_of(deployment)
        cluster_checks.check(deployment)
        manifests.template_hash(deployment, settings)
        manifests.function_labels(deployment, "0123456789abcdef")
        manifests.gpu_gib_of(deployment, 1 << 30)

    seeds = tuple(
        json.dumps(seed).encode() for seed in (DEPLOYMENT, STAGE, {**DEPLOYMENT, "labels": _LABELS})
    )
    return Ready(run, (BadRequest, TooLarge, UnknownFunction, ValueError, *UNREADABLE), seeds)


def labels(scratch: Path) -> Ready:
    """Labels of scaling, for every role; what is taken lies within the bounds."""
    from keystage.local.labels import MAX_REPLICAS, parse

    def run(data: bytes) -> None:
        given = msgspec.json.decode(data, type=dict[str, str])
        for role in ("stage", "router", "function", "x"):
            try:
                found = parse(given, role)
            except ValueError:
                continue
            if not 0 <= found.min <= found.max <= MAX_REPLICAS or not 0 <= found.zero_duration_s < 1e10:
                raise FuzzError(f"{found}")

    return Ready(run, UNREADABLE, (json.dumps(_LABELS).encode(), b"{}"))


def durations(scratch: Path) -> Ready:
    """Durations as Go writes them, quantities as Kubernetes does, times, numbers of annotations."""
    from keystage.gateway.queries import unix_s
    from keystage.kubernetes import view
    from keystage.kubernetes.cores import quantity
    from keystage.local.durations import MAX_S, go_duration, parse_go_duration
    from keystage.openfaas.advice import duration_s

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for read in (view.seconds, view.number, quantity, unix_s, duration_s):
            found = read(text)
            if found is not None and found != found:
                raise FuzzError(f"{read} makes {found} of {text!r}")
        seconds = parse_go_duration(text)
        if not 0 <= seconds <= MAX_S or abs(parse_go_duration(go_duration(seconds)) - seconds) > 1e-5 * max(
            1, seconds
        ):
            raise FuzzError(f"{text!r} is {seconds}")

    seeds = (
        b"1h30m",
        b"1.5s",
        b"+100ms",
        b"500m",
        b"1e3Gi",
        b"2026-07-01T12:00:00.5Z",
        b"2026-01-01T00:00:00+23:59",
    )
    return Ready(run, (ValueError,), seeds)


def queries(scratch: Path) -> Ready:
    """Query parameters of the management API, names, callback addresses, Redis addresses."""
    from urllib.parse import parse_qsl

    from keystage.gateway.backend import BadRequest, UnknownFunction
    from keystage.gateway.names import check_secret_name, function_name
    from keystage.gateway.queries import LogQuery, boolean
    from keystage.gateway.queue_address import CallbackRules
    from keystage.wire.redis_address import check_redis, shown

    rules = CallbackRules(("*.example.org", "host:8080", "[::1]:90"))

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        shown(text)
        for check in (check_redis, CallbackRules().check, rules.check, check_secret_name, function_name):
            try:
                check(text)
            except (BadRequest, UnknownFunction, ValueError):
                continue
        query = dict(parse_qsl(text, keep_blank_values=True))
        boolean(query, "usage")
        LogQuery.parse(query)

    seeds = (
        b"name=a&tail=10&since=2026-07-01T12:00:00Z&follow=1", b"redis://user:pw@h:1/2", b"http://x.example.org:80/a",
        b"unix:///run/r.sock", b"http://[::1]:90/", b"http://\xe2\x84\x80/", b"name=a.openfaas-fn&usage=t",
    )  # fmt: skip
    return Ready(run, (BadRequest,), seeds)


def stack(scratch: Path) -> Ready:
    """`stack.yml`, with a file of its environment."""
    from keystage.openfaas.stack import StackError, deployments, read_stack

    file = scratch / "stack.yml"
    (scratch / "env.yml").write_text("environment:\n  A: b\n")

    def run(data: bytes) -> None:
        file.write_bytes(data)
        for deployment in deployments(read_stack(file), scratch):
            msgspec.json.encode(deployment)

    good = (
        b"version: 1.0\nprovider:\n  name: openfaas\n  gateway: http://127.0.0.1:8080\nfunctions:\n  a:\n"
        b"    image: i\n    environment: {A: 1, B: yes}\n    environment_file: [env.yml]\n"
        b"    limits: {memory: 1Gi}\n    labels:\n      com.openfaas.scale.min: 1\n    constraints:\n"
        b"      - zone=a\n    readonly_root_filesystem: true\n"
    )
    anchors = b"functions:\n  a: &a\n    image: i\n  b: *a\n  c: {<<: *a, image: j}\n"
    bomb = b"a: &a {x: y}\n" + b"".join(
        b"%c: &%c {" % (98 + i, 98 + i) + b"".join(b"%d: *%c, " % (j, 97 + i) for j in range(9)) + b"}\n"
        for i in range(12)
    )
    return Ready(run, (StackError,), (good, anchors, bomb + b"functions: *m\n"))


def policy(scratch: Path) -> Ready:
    """`KEYSTAGE_POLICY`, and the requests of pods."""
    from support.controller_records import ticks
    from support.controller_world import FluidStage, FluidWorld

    from keystage.controller.config import parse_policy, parse_requests
    from keystage.controller.domain.state import PolicyState
    from keystage.controller.policy.decide import decide
    from keystage.controller.policy.settings import PolicySettings

    records = list(ticks(FluidWorld([FluidStage(0.01), FluidStage(0.005)]), [4.0, 40.0, 40.0, 4.0, 0.0]))

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        with contextlib.suppress(ValueError):
            parse_requests(text)
        settings = parse_policy(text)
        state = PolicyState()
        for record in records:
            state = decide(settings, record.snapshot, state).state

    seeds = (msgspec.json.encode(PolicySettings()), b"{}", b"cpu=100m,memory=256Mi")
    return Ready(run, (ValueError,), seeds)


def decisions(scratch: Path) -> Ready:
    """A log of decisions: replayed, and shown to people."""
    from support.controller_records import ticks
    from support.controller_world import FluidStage, FluidWorld

    from keystage.controller.decisions import replay

    file = scratch / "decisions.jsonl"

    def run(data: bytes) -> None:
        file.write_bytes(data)
        replay(file)

    records = list(ticks(FluidWorld([FluidStage(0.01), FluidStage(0.005)]), [4.0, 40.0, 40.0, 4.0]))
    return Ready(run, (), tuple(msgspec.json.encode(record) + b"\n" for record in records))


def stored_state(scratch: Path) -> Ready:
    """What the supervisor, the queue and the KeysManager find on disk or in Redis when they begin."""
    from keystage.gateway import queue
    from keystage.keysmanager.history import History
    from keystage.keysmanager.revocations import Revocations
    from keystage.local import store
    from keystage.local.api import Deployment, FunctionRecord
    from keystage.local.errors import CorruptState

    files = [scratch / name for name in ("functions.json", "history.json", "revoked")]

    def run(data: bytes) -> None:
        for file in files:
            file.write_bytes(data)
        history = History(files[1])
        history.load()
        Revocations(files[2]).read()
        for call in (queue.decode, lambda _: store.load(files[0])):
            try:
                call(data)
            except (ValueError, CorruptState):
                continue

    functions = msgspec.json.encode(
        [FunctionRecord(deployment=msgspec.convert(DEPLOYMENT, Deployment), created_at_s=1.0)]
    )
    entry = {
        "name": {"bundle": "file:///b", "stage": 1},
        "identity": "ab" * 32,
        "at_s": 1.5,
        "uses": 3,
        "is_valid": True,
    }
    return Ready(run, (), (functions, json.dumps([entry]).encode(), b"ab" * 32 + b"\n"))


def upstream(scratch: Path) -> Ready:
    """Answers of replicas, cut anywhere, as the gateway's client reads them."""
    from keystage.gateway.upstream_answer import MAX_HEAD_BYTES, Answer, UpstreamBroken

    def run(data: bytes) -> None:
        flags, step, body = data[:1] or b"\0", data[1:2] or b"\x10", data[2:]
        answer = Answer()
        for _ in range(2):
            answer.begin(is_head=bool(flags[0] & 1))
            width = max(1, step[0])
            for at in range(0, len(body), width):
                answer.feed(body[at : at + width])
            if (
                answer.held_bytes > len(body)
                or sum(len(a) + len(b) for a, b in answer.headers) > MAX_HEAD_BYTES
            ):
                raise FuzzError("more than was sent")
            answer.take()
            answer.end()
            if not answer.is_complete or not answer.keep_alive:
                return

    seeds = (
        b"\0\x20HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"\1\x03HTTP/1.1 204 No Content\r\n\r\n",
        (b"\0\x05HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\n"),
        b"\0\xffHTTP/1.0 500 x\r\nConnection: close\r\n\r\nrest",
        b"\0\x11HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\nContent-Length: 5\r\n\r\n",
    )  # fmt: skip
    return Ready(run, (UpstreamBroken,), seeds)


def keysmanager(scratch: Path) -> Ready:
    """Messages of the KeysManager's socket, from a peer that says what the input says."""
    import socket
    from typing import get_args

    from fuzz.of_wire import _made
    from keystage.keysmanager.channel import Channel, ChannelError, Told

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)

    def run(data: bytes) -> None:
        theirs.send(data or b"\0")
        received = channel.receive()
        if received is not None:
            for fd in received[1]:
                raise FuzzError(f"descriptor {fd} out of nowhere")

    def flat(kind: Any) -> list[Any]:
        inner = get_args(kind)
        return [one for part in inner for one in flat(part)] if inner else [kind]

    def example(kind: Any) -> bytes:
        info = msgspec.inspect.type_info(kind)
        fields = {field.encode_name: _made_named(field.type) for field in info.fields}
        return msgspec.msgpack.encode({"type": info.tag, **fields})

    def _made_named(info: Any) -> Any:
        if isinstance(info, msgspec.inspect.StructType) and not info.array_like:
            return {field.encode_name: _made_named(field.type) for field in info.fields}
        if isinstance(info, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
            return [_made_named(info.item_type)]
        return _made(info)

    seeds = tuple(example(kind) for kind in flat(Told) if kind.__struct_config__.tag)
    return Ready(run, (ChannelError,), seeds)


def nodes_and_devices(scratch: Path) -> Ready:
    """Small texts that settings hold: stages, shares, batching, devices, emulated GPUs, files of secrets."""
    from keystage.batching.choice import parse_batching, parse_late
    from keystage.keysmanager.config import read_token
    from keystage.keysmanager.device_plugin_gpus import parse_emulated
    from keystage.router.config import _deadline_s, _spus
    from keystage.worker import executor
    from keystage.worker.config import parse_stages

    token = scratch / "token"
    token.touch(0o600)

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        token.write_bytes(data)
        reads = (
            parse_batching,
            parse_late,
            parse_emulated,
            parse_stages,
            executor.parse_emulated,
            _spus,
            _deadline_s,
        )
        for read in reads:
            try:
                read(text)
            except ValueError:
                continue
        read_token(token)

    seeds = (
        b"0-3", b"2", b"timeout:5", b"partial-slo", b"demote", b"a=1,b=20", b'{"deadline_s": 0.2}', b"2x80",
        b"emulated:alpha=0.1,beta=0.2,load=1", b"0:80,1:40",
    )  # fmt: skip
    return Ready(run, (ValueError,), seeds)
