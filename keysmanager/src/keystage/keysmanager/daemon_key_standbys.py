"""Standbys for key stages, asked for by nobody: as the list says, while memory lasts.

Beside `daemon`, run by `app`: looks once a second at the key-stage list, the GPUs and the standbys there
are. What a standby needs to know (device, type, sizes) is learned from the replicas that were wanted of its
bundle, so there are none before the first of them. They hang on this daemon alone, and whoever asks for
standbys of the same shape class takes the class over. This module must not start or end a process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from keystage.bundle.errors import BundleError
from keystage.keysmanager import daemon_needs, inventory
from keystage.keysmanager.api import Fork, Gpu, Parameters
from keystage.keysmanager.daemon_names import Names
from keystage.keysmanager.daemon_needs import BUNDLE, STAGES
from keystage.keysmanager.daemon_standbys import Standbys
from keystage.keysmanager.ledger import Ledger
from keystage.keysmanager.standby_plan import CONTEXT_BYTES, Class, decided, gpu_of
from keystage.worker.config import KV_BYTES_A_STAGE

log = logging.getLogger("keystage.keysmanager")

LOOK_S = 1.0
"""What a worker takes where its environment names nothing."""
DEVICE, NEXT_DEVICE = "KEYSTAGE_DEVICE", "KEYSTAGE_NEXT_DEVICE"
"""Of a replica, and of the next one of its function, where they have a GPU each."""
_LEARNED_LIMIT = 256
_OWN = ("KEYSTAGE_REPLICA", "KEYSTAGE_EVENTS")
"""Of one replica alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """A class, and the environment of its standbys."""

    of: Class
    env: Mapping[str, str]


class KeyStandbys:
    """Automatic standbys of one daemon.

    Args:
        ledger, names, standbys: of the daemon.
        each: how many a key stage; 0: none at all.
        is_short: whether host memory is over its budget.
        gpus: what NVML sees; may block.
    """

    def __init__(
        self,
        ledger: Ledger,
        names: Names,
        standbys: Standbys,
        each: int,
        is_short: Callable[[], bool],
        gpus: Callable[[], Sequence[Gpu]] = lambda: inventory.gpus()[0],
    ) -> None:
        self._ledger = ledger
        self._names = names
        self._standbys = standbys
        self._each = each
        self._is_short = is_short
        self._gpus = gpus
        self._learned: dict[tuple[str, int | None], Mapping[str, str]] = {}
        self._asked: dict[str, int] = {}
        self._life_read, self._life_write = os.pipe()

    def learn(self, fork: Fork, env: Mapping[str, str], parameters: Sequence[Parameters]) -> None:
        """A replica is wanted: what its environment says holds for standbys of its bundle, too.

        Args:
            fork: as it was asked for.
            env: as the replica gets it.
            parameters: of its stages.
        """
        is_cuda = env.get(DEVICE, "").startswith("cuda")
        if not self._each or len(parameters) != 1 or not is_cuda or not daemon_needs.can_be_standby(fork):
            return
        name = parameters[0].name
        kept = {key: value for key, value in env.items() if key not in _OWN}
        for key in ((name.bundle, name.stage), (name.bundle, None)):
            self._learned.pop(key, None)
            self._learned[key] = kept
        while len(self._learned) > _LEARNED_LIMIT:
            del self._learned[next(iter(self._learned))]

    async def run(self) -> None:
        """Looks for ever."""
        while self._each:
            if self._learned or self._asked:
                await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Asks for one standby more, or for fewer."""
        gpus = await asyncio.to_thread(self._gpus)
        found = {wanted.of.shape: wanted for wanted in self._wanted(gpus)}
        for shape in [s for s in self._asked if self._is_taken_over(s)]:
            del self._asked[shape]
        next_counts = decided(
            [wanted.of for wanted in found.values()],
            self._asked,
            gpus,
            is_short=self._is_short(),
            is_settled=self._is_settled(),
        )
        for shape, count in next_counts.items():
            if count == self._asked.get(shape, 0):
                continue
            log.info("%d standbys of %s for key stages", count, shape)
            env = found[shape].env if shape in found else {}
            self._standbys.want(shape, env, os.dup(self._life_read), count, is_own=True)
            if count:
                self._asked[shape] = count
            else:
                del self._asked[shape]

    def close(self) -> None:
        """Lets go of the pipe that stands for an owner."""
        os.close(self._life_read)
        os.close(self._life_write)

    def _is_settled(self) -> bool:
        idle = Counter(entry.shape for entry in self._ledger.standbys(0.0) if entry.state == "idle")
        return all(idle[shape] >= count for shape, count in self._asked.items())

    def _is_taken_over(self, shape: str) -> bool:
        """Whether somebody has asked for the class himself since, or has ended its standbys."""
        wish = self._standbys.wish(shape)
        return wish is None or not wish.is_own

    def _wanted(self, gpus: Sequence[Gpu]) -> Iterable[_Wanted]:
        """Classes of the key stages, the most important first, that nobody else asks for."""
        counts: Counter[str] = Counter()
        first: dict[str, tuple[Parameters, dict[str, str]]] = {}
        for parameters in self._ledger.state.listed.values():
            if (found := self._shape(parameters)) is None:
                continue
            shape, env = found
            counts[shape] += self._each
            first.setdefault(shape, (parameters, env))
        for shape, (parameters, env) in first.items():
            if self._standbys.wish(shape) is not None and self._is_taken_over(shape):
                continue
            kv_bytes = env.get("KEYSTAGE_KV_BYTES", "")
            kept_bytes = (int(kv_bytes) if kv_bytes.isdecimal() else 0) or KV_BYTES_A_STAGE
            need_bytes = parameters.nbytes + CONTEXT_BYTES + kept_bytes
            gpu = gpu_of(env[DEVICE], env.get("CUDA_VISIBLE_DEVICES", ""), gpus)
            yield _Wanted(Class(shape, counts[shape], gpu, need_bytes), env)

    def _shape(self, parameters: Parameters) -> tuple[str, dict[str, str]] | None:
        """Shape class of a key stage and the environment of its standbys, None: nothing is known of it."""
        name = parameters.name
        learned = self._learned.get((name.bundle, name.stage)) or self._learned.get((name.bundle, None))
        if learned is None:
            return None
        env = {**learned, STAGES: str(name.stage), "KEYSTAGE_REPLICA": "standby"}
        env[DEVICE] = env.get(NEXT_DEVICE) or env[DEVICE]
        try:
            needs = daemon_needs.of({**env, BUNDLE: name.bundle})
            return needs.shape(parameters, self._names.pipeline(parameters.identity, name)), env
        except (BundleError, ValueError) as error:  # replaced a moment ago, or a variable that is none
            log.debug("stage %d of %s: %s", name.stage, name.bundle, error)
            return None
