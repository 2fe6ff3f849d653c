"""A real fork server, its holders and replicas, as the daemon sees them; and random bundles to hold."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch

from keystage.bundle import store
from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageSpec
from keystage.bundle.hashing import file_chunks, identity
from keystage.bundle.plan import parameters as count
from keystage.bundle.plan import roles
from keystage.bundle.safetensors_file import header_bytes
from keystage.keysmanager import segment
from keystage.keysmanager.api import Held, Hold, Parameters, Refused, Spawn, Spawned, StageName
from keystage.keysmanager.channel import Channel, Told, pair
from keystage.keysmanager.hold_pipeline import trimmed
from keystage.local.adopted import subreaper
from keystage.models.base import torch_dtype
from keystage.models.families import family_named

WAIT_S = 60.0
T = TypeVar("T")


def random_bundle(
    folder: Path,
    *,
    hidden: int = 64,
    width: int = 160,
    layers: int = 2,
    vocab: int = 97,
    stages: int = 1,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Writes a bundle of a random Llama; the same one for the same arguments."""
    heads = hidden // 16 if hidden < 512 else hidden // 64
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **config,
    }
    family = family_named("llama")
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(hidden)
    specs = []
    for index, role in enumerate(roles(family, settings, stages, "uniform", dtype)[0]):
        tensors = family.stage_tensors(settings, role)
        path = folder / f"stage-{index:02d}.safetensors"
        with path.open("wb") as file:
            file.write(header_bytes({t.name: t.shape for t in tensors}, dtype))
            for tensor in tensors:
                values = torch.empty(tensor.shape).uniform_(-0.2, 0.2, generator=generator)
                kind = values.to(torch_dtype(dtype))
                file.write(kind.view(-1).view(torch.uint8).numpy().data)
        chunks = file_chunks(path)
        specs.append(
            StageSpec(
                index=index,
                file=path.name,
                layers=(role.first_layer, role.end_layer),
                parameters=count(tensors),
                nbytes=path.stat().st_size,
                chunks=chunks,
                identity=identity(chunks, dtype),
                activation_bytes=hidden * 4,
            )
        )
    pipeline = Pipeline(
        version=BUNDLE_VERSION,
        name="random",
        family="llama",
        execution="looping",
        dtype=dtype,
        config=settings,
        stages=specs,
        edges=[*((i, i + 1) for i in range(stages - 1)), (stages - 1, 0)],
        context_length=128,
        vocab_size=vocab,
        hidden_size=hidden,
        eos=[2],
    )
    store.write(folder, pipeline)
    return folder


def parameters_of(bundle: Path, stage: int = 0) -> Parameters:
    """What the catalog would say of a stage."""
    pipeline = store.load(bundle)
    spec = pipeline.stages[stage]
    return Parameters(
        name=StageName(f"file://{bundle}", stage),
        pipeline=pipeline.name,
        identity=spec.identity,
        dtype=pipeline.dtype,
        file=spec.file,
        nbytes=spec.nbytes,
        chunks=(),
    )


def raw_segment(bundle: Path, stage: int = 0) -> int:
    """A sealed segment with a stage's file, as the loader makes it."""
    content = (bundle / store.load(bundle).stages[stage].file).read_bytes()
    draft = segment.create(len(content), "keystage-raw-test")
    with draft.window(0, len(content)) as window:
        window[:] = content
    return draft.seal()


_reapers: list[contextlib.AbstractContextManager[None]] = []


def set_subreaper(is_on: bool) -> None:
    """Makes this process the one to which orphaned descendants are handed; on as often as off."""
    if is_on:
        _reapers.append(subreaper())
        _reapers[-1].__enter__()
    else:
        _reapers.pop().__exit__(None, None, None)


class Replica:
    """A forked probe and our ends of what it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.lifeline_read, self.lifeline = os.pipe()
        self.output, self.output_write = os.pipe()
        self.asked, self._http = pair()
        claim, self._claim = pair()
        self.claim = Channel(claim)
        self.asked.settimeout(WAIT_S)

    def theirs(self) -> tuple[int, ...]:
        return self.lifeline_read, self.output_write, self._http.fileno(), self._claim.fileno()

    def close_theirs(self) -> None:
        os.close(self.lifeline_read)
        os.close(self.output_write)
        self._http.close()
        self._claim.close()

    def ask(self, *question: Any) -> Any:
        self.asked.send(json.dumps(question).encode())
        body = self.asked.recv(1 << 20)
        assert body, f"{self.name} has ended: {self.said()!r}"
        return json.loads(body)

    def said(self) -> str:
        """Its output so far."""
        text = b""
        while select.select([self.output], [], [], 0.05)[0]:
            block = os.read(self.output, 1 << 16)
            if not block:
                break
            text += block
        return text.decode()

    def wait(self) -> int:
        """Exit code; negative: the signal that ended it. Needs `set_subreaper`."""
        return os.waitstatus_to_exitcode(wait_pid(self.pid))

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                wait_pid(self.pid)
        self.asked.close()
        self.claim.close()
        for fd in (self.lifeline, self.output):
            with contextlib.suppress(OSError):
                os.close(fd)


def wait_pid(pid: int) -> int:
    """Reaps a child within a bound; its wait status."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    raise AssertionError(f"process {pid} has not ended in {WAIT_S} s")


class Forks:
    """The fork server, and all that was forked. Use as a context."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program
        self.replicas: list[Replica] = []
        self.holders: list[Channel] = []
        self.holder_pids: list[int] = []

    def __enter__(self) -> Self:
        set_subreaper(True)
        ours, theirs = pair()
        start = ["-c", self._program] if self._program else ["-m", "keystage.keysmanager.forkserver"]
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, *start, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        theirs.close()
        self.channel = Channel(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self.replicas:
            replica.close()
        for holder in self.holders:
            holder.close()
        self.channel.close()
        code = self.process.wait(WAIT_S)
        for pid in self.holder_pids:  # ours, since the fork server has ended; they end at end of file
            with contextlib.suppress(ChildProcessError):
                wait_pid(pid)
        set_subreaper(False)
        assert code in (0, -signal.SIGKILL), f"the fork server ended with {code}"

    def hold(
        self,
        bundle: Path,
        stage: int = 0,
        *,
        prepare: Literal["cpu", "none"] = "cpu",
        dtype: str = "float32",
        parameters: Parameters | None = None,
        fd: int | None = None,
    ) -> tuple[Channel, Held | Refused]:
        """Starts a holder: its channel, and its first word."""
        ours, theirs = pair()
        raw = raw_segment(bundle, stage) if fd is None else fd
        body = trimmed((bundle / "pipeline.json").read_bytes())
        message = Hold(
            parameters=parameters or parameters_of(bundle, stage), pipeline=body, prepare=prepare, dtype=dtype
        )
        self.channel.send(message, (theirs.fileno(), raw))
        theirs.close()
        os.close(raw)
        self.holder_pids.append(told(self.channel, Spawned).pid)
        holder = Channel(ours)
        self.holders.append(holder)
        received = receive(holder, takes=1)  # its packed form may be beside it
        assert isinstance(received, Held | Refused)
        return holder, received

    def spawn(
        self,
        forker: Channel | None = None,
        *,
        module: str = "support.keysmanager_probe",
        sharing: Literal["shared", "private"] = "shared",
        **env: str,
    ) -> Replica:
        """Forks a probe from a holder, or from the fork server."""
        replica, answer = self.try_spawn(forker, module=module, sharing=sharing, **env)
        assert isinstance(answer, Spawned), answer
        return replica

    def try_spawn(
        self,
        forker: Channel | None = None,
        *,
        module: str = "support.keysmanager_probe",
        sharing: Literal["shared", "private"] = "shared",
        **env: str,
    ) -> tuple[Replica, Told]:
        """As `spawn`, with the answer."""
        replica = Replica(f"r{len(self.replicas)}")
        self.replicas.append(replica)
        channel = forker or self.channel
        message = Spawn(
            replica=replica.name, module=module, env={"KEYSTAGE_THREADS": "1", **env}, sharing=sharing
        )
        channel.send(message, replica.theirs())
        replica.close_theirs()
        answer = receive(channel)
        if isinstance(answer, Spawned):
            replica.pid = answer.pid
        return replica, answer


def receive(channel: Channel, *, takes: int = 0) -> Told:
    """The next message, within a bound; so many descriptors may be beside it, which are closed."""
    assert select.select([channel], [], [], WAIT_S)[0], f"nothing came in {WAIT_S} s"
    received = channel.receive()
    assert received is not None, "the other end is closed"
    message, fds = received
    assert len(fds) <= takes
    for fd in fds:
        os.close(fd)
    return message


def told(channel: Channel, kind: type[T]) -> T:
    """The next message, which must be of a kind."""
    message = receive(channel)
    assert isinstance(message, kind), message
    return message


@contextlib.contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes, memory files included."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_fds(pid: int | Literal["self"] = "self") -> set[str]:
    """Numbers of a process's open descriptors."""
    return {entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()}


def status_bytes(pid: int, field: str) -> int:
    """A field of /proc/<pid>/status in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def mappings(pid: int, name: str) -> Iterator[dict[str, str]]:
    """Entries of /proc/<pid>/smaps whose line holds `name`: fields by name, `line` the first line."""
    entry: dict[str, str] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, _, rest = line.partition(":")
        if " " not in head and rest:
            if entry is not None:
                entry[head] = rest.strip()
            continue
        if entry is not None:
            yield entry
        entry = {"line": line} if name in line else None
    if entry is not None:
        yield entry


def pss_bytes(pid: int, name: str) -> int:
    """Proportional share of the mappings whose name holds `name`."""
    return sum(int(entry["Pss"].split()[0]) * 1024 for entry in mappings(pid, name))
