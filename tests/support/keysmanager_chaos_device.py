"""What the chaos of replicas on a device adds: a bundle of real stages, standby workers, and NVML's word.

All stages with parameters are of one shape class, so that a standby can become each of them. The oracle
compares what a replica says of the parameters on its device with the files; NVML tells what the GPU
has allocated, to whomever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.keysmanager_chaos import Chaos, Oracle
from support.keysmanager_daemon import Node, Replica, name_of, state_of
from support.keysmanager_device_replica import COPYING, digest_of, file_parameters

from keystage.bundle import store
from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageSpec
from keystage.bundle.dtypes import ITEM_BYTES
from keystage.bundle.hashing import file_chunks, identity
from keystage.bundle.safetensors_file import header_bytes
from keystage.keysmanager.api import StandbyEntry, Standbys
from keystage.models.base import StageRole
from keystage.models.families import family_named

STAGES = range(1, 9)
"""Those with parameters; one before and one after them are only described."""
CPU_SHAPE = {"hidden": 128, "width": 384, "head": 64, "layers": 2, "dtype": "float32"}
GPU_SHAPE = {"hidden": 512, "width": 1408, "head": 64, "layers": 6, "dtype": "bfloat16"}
TOLERANCE_BYTES = 2 << 20
"""Of GPU memory: what the driver keeps for itself may grow by a page of 2 MiB."""
IDLE_S = 120.0
"""A standby on a GPU makes a context and records its decode step first."""
_BLOCK_ITEMS = (1 << 20) - 3
_TOLERANCE = 0.05
"""Of outputs, absolute and relative: a standby's decode step is one recorded graph for all rows."""


def write_stages(
    folder: Path, *, hidden: int, width: int, head: int, layers: int, dtype: str, seed: int
) -> Pipeline:
    """Writes middle stages of a Llama, all of one shape and with different random parameters."""
    heads = hidden // head
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "num_hidden_layers": len(STAGES) * layers + 2,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    activation_bytes = hidden * ITEM_BYTES[dtype]
    specs = [StageSpec(0, "", (0, 1), 0, 0, [], "first", activation_bytes)]
    for index in STAGES:
        first = 1 + (index - 1) * layers
        path = folder / f"stage-{index:02d}.safetensors"
        _write_stage(path, config, StageRole(first, first + layers, False, False), dtype, 100 * seed + index)
        nbytes, chunks = path.stat().st_size, file_chunks(path)
        count = nbytes // ITEM_BYTES[dtype]
        specs.append(
            StageSpec(
                index, path.name, (first, first + layers), count, nbytes, chunks,
                identity(chunks, dtype), activation_bytes,
            )
        )  # fmt: skip
    end = specs[-1].layers[1]
    specs.append(StageSpec(len(specs), "", (end, end + 1), 0, 0, [], "last", activation_bytes))
    edges = [*((i, i + 1) for i in range(len(specs) - 1)), (len(specs) - 1, 0)]
    pipeline = Pipeline(
        version=BUNDLE_VERSION, name="chaos", family="llama", execution="looping", dtype=dtype, config=config,
        stages=specs, edges=edges, context_length=4096, vocab_size=1024, hidden_size=hidden, eos=[],
    )  # fmt: skip
    store.write(folder, pipeline)
    return pipeline


def _write_stage(path: Path, config: dict[str, Any], role: StageRole, dtype: str, seed: int) -> None:
    tensors = family_named("llama").stage_tensors(config, role)
    noise = np.random.default_rng(seed)
    block = _stored(0.02 * noise.standard_normal(_BLOCK_ITEMS, dtype=np.float32), dtype)
    with path.open("wb") as file:
        file.write(header_bytes({t.name: t.shape for t in tensors}, dtype))
        for tensor in tensors:
            count = math.prod(tensor.shape)
            if len(tensor.shape) == 1:
                norm = 1 + 0.1 * noise.standard_normal(count, dtype=np.float32)
                file.write(_stored(norm, dtype).data)
                continue
            while count:
                part = block[:count]
                file.write(part.data)
                count -= len(part)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as the file has them; bfloat16 is the upper half of float32."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


class DeviceOracle(Oracle):
    """Versions are made once and copied into place.

    Attributes:
        on_device: SHA-256 of each stage's parameters as a device has them.
        outputs: what replicas computed with parameters, by identity and device.

    Args:
        folder: of the bundle; versions lie beside it.
        shape: of the stages, see `write_stages`.
    """

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        self._shape = shape
        self._of_version: dict[int, dict[int, str]] = {}
        self.on_device: dict[int, str] = {}
        self.outputs: dict[tuple[str, str], list[float]] = {}
        super().__init__(folder, STAGES, self._written)

    def _written(self, folder: Path, version: int) -> Pipeline:
        made = folder.parent / f"version-{version}"
        if not made.exists():
            pipeline = write_stages(made, **self._shape, seed=version)
            self._of_version[version] = {
                stage: digest_of(file_parameters(made / pipeline.stages[stage].file, pipeline, stage))
                for stage in STAGES
            }
        self.on_device = self._of_version[version]
        folder.mkdir(exist_ok=True)
        for path in sorted(made.iterdir()):  # `pipeline.json` comes before the files: a moment's mismatch
            draft = folder / f".{path.name}"
            shutil.copyfile(path, draft)
            draft.replace(folder / path.name)
        return store.load(folder)

    @property
    def stage_bytes(self) -> int:
        """Of one stage's file."""
        return self.path(STAGES[0]).stat().st_size


class DeviceChaos(Chaos):
    """Operations on replicas of a device, standbys among them.

    Args:
        node: the daemon's.
        oracle: of its bundle.
        rng: decides.
        device: where replicas run.
        run: folder for what replicas tell one another.

    Attributes:
        wanted: standbys asked for.
        copying: replicas that died with their copy queued.
    """

    module = "support.keysmanager_device_replica"

    def __init__(self, node: Node, oracle: DeviceOracle, rng: random.Random, device: str, run: Path) -> None:
        super().__init__(node, oracle, rng)
        self.device_oracle = oracle
        self.device = device
        self.wanted = 0
        self.copying = 0
        self.owner_read, self.owner_write = os.pipe()
        run.mkdir(mode=0o700)
        own = {name: value for name, value in os.environ.items() if not name.startswith("KEYSTAGE_")}
        self.env = own | {
            "KEYSTAGE_ROLE": "stage",
            "KEYSTAGE_PIPELINE": "chaos",
            "KEYSTAGE_ROUTER": f"ipc://{run}/router",
            "KEYSTAGE_RUN": str(run),
            "KEYSTAGE_THREADS": "1",
            "KEYSTAGE_KV_BYTES": str(64 << 20),
        }

    def close(self) -> None:
        """Gives up the standbys' lifeline."""
        os.close(self.owner_read)
        os.close(self.owner_write)

    # ------------------------------------------------------------ what a replica says

    async def start(self, stage: int, **env: str) -> Replica | None:
        """As in `Chaos`; parameters may come from another replica's GPU, or not."""
        return await super().start(stage, **{"KEYSTAGE_PEER_GPU": str(self.rng.randint(0, 1)), **env})

    def judge_line(self, stage: int, replica: Replica, line: str) -> None:
        """The device has the file's parameters; a worker that reads a damaged bundle ends."""
        oracle = self.device_oracle
        assert line.startswith("{"), (line, replica.forked)
        said = json.loads(line)
        if "failed" in said:
            is_bare = replica.forked.via == "fork-server"
            assert is_bare and stage in oracle.damaged, (said, replica.forked)  # noqa: PT018
            self.node.replicas.remove(replica)
            replica.end()
            return
        assert said["digest"] == oracle.on_device[stage], (said, replica.forked)
        before = oracle.outputs.setdefault((oracle.identity[stage], said["device"]), said["output"])
        for now, then in zip(said["output"], before, strict=True):
            assert math.isclose(now, then, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE), (said, before)

    async def fork_host(self) -> None:
        """The switch that keeps parameters in host memory; a standby, which has an arena, is not used."""
        stage = self.stage()
        replica = await self.start(stage, KEYSTAGE_DEVICE_COPY="0")
        if replica is not None:
            assert replica.forked.via != "standby"
            await self.check(stage, replica)

    async def kill_in_copy(self) -> None:
        """The child is dead with its copy on the way, or right after it."""
        # A private copy: a standby would begin to fill its arena before it can be told to die.
        replica = await self.start(self.stage(), TEST_DIES="copy", KEYSTAGE_PEER_GPU="0", sharing="private")
        if replica is not None:
            self.copying += await replica.line() == COPYING
            self.node.replicas.remove(replica)
            replica.end()

    # ------------------------------------------------------------ standbys

    async def standbys_ask(self) -> None:
        """One or two are wanted."""
        self.wanted = self.rng.randint(1, 2)
        await self._ask(self.wanted)

    async def standbys_dismiss(self) -> None:
        """None is wanted; those that are idle end."""
        pids = [entry.pid for entry in await self._standbys() if entry.pid]
        self.wanted = 0
        await self._ask(0)
        await self.node.wait(self._has_none, "no standby is listed", IDLE_S)
        own = {replica.pid for replica in self.node.replicas}
        left = [pid for pid in pids if pid not in own]
        await self.node.wait(lambda: all(state_of(p) in ("", "Z") for p in left), "they have ended", IDLE_S)

    async def standby_use(self) -> None:
        """A replica, with a standby idle."""
        await self._idle()
        await self.fork()

    async def kill_standby(self) -> None:
        """SIGKILL to one, idle or not yet."""
        pids = [entry.pid for entry in await self._standbys() if entry.pid]
        if pids:
            self.slay(self.rng.choice(pids))

    async def kill_standby_in_fill(self) -> None:
        """It was told to become a replica: it dies before, in or after its copy."""
        pids = await self._idle()
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        stage = self.stage()
        starting = asyncio.create_task(self.start(stage))
        await asyncio.sleep(self.rng.uniform(0.01, 0.05))
        for pid in pids:
            _signal(pid, signal.SIGCONT)
        await asyncio.sleep(self.rng.uniform(0, 0.03))
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        replica = await starting
        if replica is None:
            return
        if replica.pid in pids:  # it became one, and died
            self.node.replicas.remove(replica)
            replica.end()
        else:
            await self.check(stage, replica)

    async def kill_daemon(self) -> None:
        """As in `Chaos`; idle standbys go with it, and the next daemon was asked for none."""
        pids = [entry.pid for entry in await self._standbys() if entry.pid]
        await super().kill_daemon()
        self.wanted = 0
        own = {replica.pid for replica in self.node.replicas}
        left = [pid for pid in pids if pid not in own]
        await self.node.wait(lambda: all(state_of(p) in ("", "Z") for p in left), "they have ended", IDLE_S)

    async def _idle(self) -> list[int]:
        if not self.wanted:
            await self.standbys_ask()

        async def found() -> list[int]:
            return [entry.pid for entry in await self._standbys() if entry.state == "idle"]

        idle: list[int] = await self.node.wait(found, "a standby is idle", IDLE_S)
        return idle

    async def _has_none(self) -> bool:
        return not await self._standbys()

    async def _standbys(self) -> tuple[StandbyEntry, ...]:
        return (await self.node.client.status()).standbys

    async def _ask(self, count: int) -> None:
        env = {
            **self.env,
            "KEYSTAGE_REPLICA": "standby",
            "KEYSTAGE_DEVICE": self.device,
        }
        request = Standbys(name=name_of(self.oracle.folder, STAGES[0]), env=env, count=count)
        await self.node.client.standbys(request, self.owner_read)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class GpuMemory:
    """What NVML says of GPU 0, for all processes together; a context manager."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used_bytes(self) -> int:
        """Allocated on the device."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def processes(self) -> int:
        """Processes with a context; a container may see none of them, or may not ask."""
        try:
            return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except self._nvml.NVMLError:
            return 0

    def close(self) -> None:
        """Lets go of NVML."""
        self._nvml.nvmlShutdown()


@contextlib.contextmanager
def gpu_memory() -> Iterator[GpuMemory]:
    """NVML, open."""
    memory = GpuMemory()
    try:
        yield memory
    finally:
        memory.close()
