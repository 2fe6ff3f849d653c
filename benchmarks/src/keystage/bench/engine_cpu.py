"""The CPU row of `keystage bench engine`: SmolLM2 in four stages beside transformers' `generate`.

Ours is all of it: HTTP, router, four workers forked by a KeysManager whose parameters lie in shared memory
(packed there, decision 012: no worker has a private copy), client. The rival is called directly, in a process
of its own, with the same cores and element type and the number of threads that is best for it. Both run the
same prompts of equal length, greedily, to the same number of tokens; what they generate is compared. In
every round each of them runs once, in turn, while the others idle.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from keystage.bench.engine_client import complete
from keystage.bench.engine_cpu_result import Rounds, Setting, result_of
from keystage.bench.engine_rival import TransformersProcess
from keystage.bench.frame import BenchError, BenchResult
from keystage.bench.machine_use import MachineUse
from keystage.bundle import store
from keystage.bundle.errors import SplitError
from keystage.bundle.export import export_hf
from keystage.bundle.split import split
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

MODEL = "smollm2"
DTYPE = "float32"
STAGES = 4
CONCURRENT = 8
SLOTS = 16
PROMPT_TOKENS = 32
TOKENS = 64
ROUNDS = 7
QUICK_TOKENS = 16
QUICK_ROUNDS = 2
TRIAL_TOKENS = 8
READY_S = 180.0

TEXT = (
    "A model that is too large for one machine is cut into stages. Each stage is a function of its own, and "
    "each function is scaled on its own. Under bursts of requests the queue builds up at one or two stages, "
    "not everywhere. Once upon a time, in a small village by the sea, there lived a keeper of keys who knew "
    "every door of every house, and who never lost one. The capital of France is Paris, and the capital of "
    "Italy is Rome. Water boils at one hundred degrees at the level of the sea, and earlier on a mountain. "
    "To sort a list of numbers, compare neighbours and swap those that stand in the wrong order, until none "
    "do. A good bread needs flour, water, salt, time and a hot oven. The train to the north leaves at noon. "
    "When the wind turns, sailors shorten the sails and wait. Every prime number above two is odd. In winter "
    "the days are short and the nights are long, but the light on the snow is bright. She opened the letter, "
    "read it twice, and put it back into the drawer without a word."
)
"""What prompts are cut from."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where ours runs.

    Attributes:
        home: state folder; bundles under other names are put beside it.
        bundle: the model in stages.
        whole: the model in one stage.
    """

    home: Path
    bundle: Path
    whole: Path


@dataclass(frozen=True, slots=True)
class _Ours:
    """A pipeline that is up."""

    setting: Setting
    url: str


def run(*, quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Measures.

    Args:
        quick: two rounds of 16 tokens.
        full: twice as many rounds.
        out: folder that keeps the split model for the next run.

    Raises:
        BenchError: a package is missing, or something did not answer.
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS * (1 + full)
    tokens = QUICK_TOKENS if quick else TOKENS
    bundles = out.absolute() / "bundles"
    try:
        bundle = split(MODEL, STAGES, "parameters", bundles / "engine-4", "engine-4", "fp32")
        whole = split(MODEL, 1, "parameters", bundles / "engine-1", "engine-1", "fp32")
        with tempfile.TemporaryDirectory(prefix="keystage-bench-") as folder:
            model = export_hf(MODEL, Path(folder) / "model")
            place = Place(Path(folder) / "home", bundle, whole)
            prompts = _prompts(bundle, CONCURRENT)
            with TransformersProcess(model, DTYPE) as rival:
                found = asyncio.run(measure(place, rival, prompts, rounds, tokens))
    except SplitError as error:
        raise BenchError(f"the model cannot be split: {error}") from error
    return result_of(found, f"{MODEL} in {DTYPE}, prompts of {PROMPT_TOKENS} tokens")


async def measure(
    place: Place, rival: TransformersProcess, prompts: Sequence[Sequence[int]], rounds: int, tokens: int
) -> Rounds:
    """Brings ours up and measures both in rounds.

    Args:
        place: where ours runs.
        rival: up and warm.
        prompts: token ids, equally long; all at once, and each round another one alone.
        rounds: how many.
        tokens: new tokens per prompt.

    Raises:
        BenchError: something did not answer.
    """
    cores = len(os.sched_getaffinity(0))
    stages = len(store.load(place.bundle).stages)
    split_settings = [Setting(stages, 1, 0), Setting(stages, cores, 1)]
    found = Rounds(tokens, len(prompts), cores, rival.version)
    async with LocalWorld(place.home, gateway_port=None, controller=False, keysmanager=True) as world:
        ours = [await _deploy(world, place, setting) for setting in split_settings]
        one_stage = await _deploy(world, place, Setting(1, 1, 0))
        async with aiohttp.ClientSession() as session:
            for up in (*ours, one_stage):
                await complete(session, up.url, prompts, 2)
            alone_threads = await _best_threads(rival, prompts[:1], cores)
            batch_threads = await _best_threads(rival, prompts, cores)
            found.rival_threads = (alone_threads, batch_threads)
            use = MachineUse()
            for number in range(rounds):
                first = [prompts[number % len(prompts)]]
                for up in ours:
                    found.add(up.setting, 1, await complete(session, up.url, first, tokens))
                found.rival_alone.append(
                    await asyncio.to_thread(rival.generate, first, tokens, alone_threads)
                )
                found.add(one_stage.setting, 1, await complete(session, one_stage.url, first, tokens))
                for up in ours:
                    found.add(up.setting, len(prompts), await complete(session, up.url, prompts, tokens))
                found.rival_batched.append(
                    await asyncio.to_thread(rival.generate, prompts, tokens, batch_threads)
                )
            found.others_cores = use.others_cores()
        found.memory = {
            function: _memory(pid)
            for function, pid in ((r.function, r.pid) for r in world.supervisor.view().replicas)
        }
        found.parameter_bytes = {
            f"{_name(setting)}-stage-{stage.index}": stage.nbytes
            for setting, bundle in ((split_settings[0], place.bundle), (one_stage.setting, place.whole))
            for stage in store.load(bundle).stages
        }
    return found


async def _deploy(world: LocalWorld, place: Place, setting: Setting) -> _Ours:
    """Deploys the model in a setting under a name of its own, and waits for it."""
    bundle = _renamed(place.whole if setting.stages == 1 else place.bundle, place.home, _name(setting))
    pipeline = store.load(bundle)
    env = {"KEYSTAGE_WAVES": str(setting.waves)}
    await world.deploy(
        *deployments_for(bundle, pipeline, device="cpu", threads=setting.threads, slots=SLOTS, env=env)
    )
    for stage in range(len(pipeline.stages)):
        await world.wait_ready(f"{pipeline.name}-stage-{stage}", 1, READY_S)
    router = (await world.wait_ready(pipeline.name, 1, READY_S))[0]
    return _Ours(setting, f"http://{router.address}")


def _name(setting: Setting) -> str:
    return f"engine-{setting.stages}-{setting.threads}-{setting.waves}"


def _renamed(bundle: Path, home: Path, name: str) -> Path:
    """The same files as a bundle of another name: its parameters keep their identity, and are shared."""
    folder = home.parent / name
    folder.mkdir()
    for path in bundle.iterdir():
        if path.name != store.PIPELINE_FILE:
            (folder / path.name).symlink_to(path)
    store.write(folder, msgspec.structs.replace(store.load(bundle), name=name))
    return folder


async def _best_threads(rival: TransformersProcess, prompts: Sequence[Sequence[int]], cores: int) -> int:
    """With how many threads `generate` is quickest here: all cores, or one where others compute too."""
    seconds: dict[int, float] = {}
    for threads in sorted({1, cores}):
        tries = [await asyncio.to_thread(rival.generate, prompts, TRIAL_TOKENS, threads) for _ in range(3)]
        seconds[threads] = min(one.seconds for one in tries)
    return min(seconds, key=seconds.__getitem__)


def _prompts(bundle: Path, count: int) -> list[list[int]]:
    """Different prompts of the same length."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(bundle / store.load(bundle).tokenizer)).encode(TEXT).ids
    step = (len(ids) - PROMPT_TOKENS) // (count - 1)
    assert step > 0
    return [ids[i * step : i * step + PROMPT_TOKENS] for i in range(count)]


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous and shared memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    found = {line.partition(":")[0]: line.split() for line in lines}
    return int(found["RssAnon"][1]) * 1024, int(found["RssShmem"][1]) * 1024
