"""A pipeline in one process: the real router node and real worker engines over a simulated network.

Messages keep their order per (sender, receiver) and are delivered in an order that the caller draws,
so that a seed names one interleaving. Rings are real; only sockets, threads and clocks are left out.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from support.simulated_wire import CheckedExecutor, Net, NetMailbox

from keystage.bundle.api import Pipeline, emulated
from keystage.models.blocks import BLOCK_TOKENS
from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.node import RouterNode
from keystage.router.sessions import Answer
from keystage.router.streams import TokenStream
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import Ring
from keystage.worker.engine import Engine
from keystage.worker.executor import EmulatedDevice, emulated_token
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.states import WorkerState

ROUTER = "sim://router"
NOW_S = 0.0


class SimulatedPipeline:
    """Router and workers, driven by draws from `rng`.

    Args:
        rng: source of every choice.
        execution: `looping` or `single-pass`.
        stages: number of stages.
        slots: slots of a worker.
        kv_blocks: KV blocks of a worker.
        ring_bytes: size of every ring.
        waves: waves per path.
    """

    def __init__(
        self,
        rng: random.Random,
        execution: Any,
        stages: int,
        *,
        slots: int = 4,
        kv_blocks: int = 1 << 12,
        ring_bytes: int = 1 << 16,
        waves: int = 2,
        activation_bytes: int = 64,
    ) -> None:
        self.rng = rng
        self.pipeline: Pipeline = emulated(
            "sim", stages, execution=execution, activation_bytes=activation_bytes
        )
        self.slots, self.kv_blocks, self.ring_bytes, self.waves = slots, kv_blocks, ring_bytes, waves
        self.now_s = 0.0
        self.net = Net()
        self.engines: dict[str, Engine] = {}
        self.rings: dict[str, Ring] = {}
        self.names = 0
        self.unnoticed: list[str] = []
        self.streams: dict[int, TokenStream] = {}
        self.wanted: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.taken: dict[int, list[int]] = {}
        self.answers: dict[int, Future[Answer]] = {}
        self.payloads: dict[int, bytes] = {}
        self.cancelled: set[int] = set()
        self.node = self._new_node()

    def _new_node(self) -> RouterNode:
        bounds = AdmissionBounds(queue_items=10_000, default_deadline_s=1e12, max_losses=10_000)
        mailbox: Any = NetMailbox(self.net, ROUTER)
        return RouterNode(self.pipeline, mailbox, bounds, EventLog(None, "router"), 1 << 20, self.waves)

    # ------------------------------------------------------------ events

    def add_worker(self, stages: tuple[int, ...]) -> str:
        self.names += 1
        name = f"w{self.names:03d}-{stages[0]}"
        address = f"sim://{name}"
        mailbox: Any = NetMailbox(self.net, address)
        settings = EngineSettings(
            replica=name,
            stages=stages,
            routers=(ROUTER,),
            bundle=self.pipeline.stages[stages[0]].identity,
            device="emulated",
            slots=self.slots,
            kv_tokens=self.kv_blocks * BLOCK_TOKENS if self.pipeline.execution == "looping" else 0,
            max_batch=self.rng.choice((1, 2, 8)),
            wave_tokens=16,
            drain_s=3600.0,
            node="sim",
            pid=os.getpid(),
        )
        width = self.pipeline.stages[0].activation_bytes
        executor = CheckedExecutor(EmulatedDevice(), len(self.pipeline.stages), width, 256, self.kv_blocks)
        ring = self.rings[address] = Ring(self.ring_bytes)
        status = Status(state=WorkerState.READY)
        engine = Engine(settings, self.pipeline, executor, mailbox, ring, EventLog(None, name), status)
        engine._looping.clock = lambda: self.now_s
        self.engines[address] = engine
        engine._introduce(ROUTER)
        return address

    def kill_worker(self, address: str) -> None:
        """kill -9: what is queued for it is lost, of what it sent a tail may be."""
        del self.engines[address]
        for (sender, to), queue in self.net.queues.items():
            if to == address:
                queue.clear()
            elif sender == address and queue:
                for _ in range(self.rng.randrange(len(queue) + 1)):
                    queue.pop()
        # Its ring stays open: descriptors are told apart by process, and here all are of one.
        self.unnoticed.append(address)

    def notice(self) -> None:
        """The router learns of a death."""
        if self.unnoticed:
            address = self.unnoticed.pop(self.rng.randrange(len(self.unnoticed)))
            # What it sent before it died counts, as in `RouterNode._on_exit`.
            while self.net.queues.get((address, ROUTER)):
                self.deliver((address, ROUTER))
            self.node._lost(address, "exited")
            self.node._flush()

    def drain_worker(self, address: str) -> None:
        self.engines[address]._start_drain(3600.0)

    def lose_sight(self, address: str) -> None:
        """The router takes a living worker for dead."""
        self.node._lost(address, "silent")
        self.node._flush()

    def restart_router(self) -> None:
        """The router dies with its requests; a new one listens on its address."""
        self.node = self._new_node()
        self.streams, self.answers = {}, {}
        self.unnoticed = []

    def submit(self, prompt: int, max_tokens: int) -> int:
        core = self.node._looping
        assert core is not None
        number = core.submit(Generation(list(range(prompt)), max_tokens, 0.0, 1.0, 0, ()), NOW_S)
        self.streams[number] = self.node._clients.streams[number] = TokenStream()
        self.wanted[number], self.prompts[number], self.taken[number] = max_tokens, prompt, []
        self.node._flush()
        return number

    def submit_item(self, payload: bytes) -> int:
        core = self.node._single
        assert core is not None
        number = core.submit(payload, None, NOW_S)
        answer: Any = Future()
        self.answers[number] = self.node._clients.answers[number] = answer
        self.payloads[number] = payload
        self.node._flush()
        return number

    def cancel(self, number: int) -> None:
        """The client is gone, and so is its side of the request, as in `RouterNode.generate`."""
        self.node._core.cancel(number, NOW_S)
        self.cancelled.add(number)
        self.node._clients.streams.pop(number, None)
        self.node._clients.answers.pop(number, None)
        self.node._flush()

    def live(self, events: int, submit: Callable[[], int], kinds: dict[str, float]) -> None:
        """Draws `events` events of the given kinds (weights), with some progress between them.

        A worker of several stages may be among the first.
        """
        stages = len(self.pipeline.stages)
        for stage in range(stages):
            for _ in range(self.rng.randint(1, 2)):
                self.add_worker((stage,))
        if stages > 1 and self.rng.random() < 0.3:
            self.add_worker(tuple(range(self.rng.randrange(stages - 1), stages)))
        actions: dict[str, Callable[[], object]] = {
            "submit": submit,
            "cancel": self._cancel_any,
            "join": lambda: self.add_worker((self.rng.randrange(stages),)),
            "kill": lambda: self._with_any(self.kill_worker),
            "notice": self.notice,
            "drain": lambda: self._with_any(self.drain_worker),
            "lose sight": lambda: self._with_any(self.lose_sight),
            "beat": lambda: self._with_any(self.beat),
            "restart": self.restart_router,
        }
        for kind in self.rng.choices(list(kinds), list(kinds.values()), k=events):
            for _ in range(self.rng.choice((0, 1, 5, 30))):
                self.step()
            actions[kind]()
            self.check()
        # Whatever happened, there is a way to serve again.
        for stage in range(stages):
            self.add_worker((stage,))
        self.settle()

    def _with_any(self, event: Callable[[str], object]) -> None:
        if self.engines:
            event(self.rng.choice(sorted(self.engines)))

    def _cancel_any(self) -> None:
        running = [n for n, stream in self.streams.items() if not stream.is_done]
        running += [n for n, answer in self.answers.items() if not answer.done()]
        running = [n for n in running if n not in self.cancelled]
        if running:
            self.cancel(self.rng.choice(sorted(running)))

    def beat(self, address: str) -> None:
        self.engines[address]._beat()

    # ------------------------------------------------------------ progress

    def deliver(self, pair: tuple[str, str]) -> None:
        sender, to = pair
        message, payload = self.net.queues[pair].popleft()
        if to == ROUTER:
            self.node._handle(sender, api.decode_from_worker(api.encode(message)), NOW_S)
            self.node._flush()
        elif to in self.engines:
            self.engines[to]._handle(sender, api.decode_to_worker(api.encode(message)), payload)

    def run_engine(self, address: str) -> None:
        engine = self.engines[address]
        if engine._outbox.flush():
            engine._work()
        if self.rng.random() < 0.3:
            engine._outbox.pay()
        engine._drain(0.0)
        if engine._status.state is WorkerState.STOPPED:
            del self.engines[address]

    def step(self) -> bool:
        """One message or one engine turn, drawn; False when there is none."""
        pairs = self.net.waiting()
        # A blocked engine can do nothing until a message comes.
        runnable = [a for a, e in self.engines.items() if e._has_work() or (pairs and e._outbox.is_blocked)]
        choices: list[tuple[str, Any]] = [("run", a) for a in runnable] + [("deliver", p) for p in pairs]
        if not choices:
            return False
        kind, which = self.rng.choice(choices)
        if kind == "run":
            self.run_engine(which)
        else:
            self.deliver(which)
        self.check()
        return True

    def settle(self, limit: int = 20_000) -> None:
        """Delivers and runs until nothing is left to do, heart beats and drains included."""
        for _ in range(4):
            while self.unnoticed:
                self.notice()
            self._run_dry(limit)
            for address in list(self.engines):
                self.beat(address)
            self._run_dry(limit)

    def _run_dry(self, limit: int) -> None:
        for count in range(limit):
            has_moved = self.step() or self._wait()
            if not has_moved or count % 50 == 49:
                owing = [e for e in self.engines.values() if e._outbox.owes]
                for engine in owing:
                    engine._outbox.pay()
                if not has_moved and not owing:
                    for address in list(self.engines):
                        self.run_engine(address)
                    if not self.net.waiting():
                        return
        raise AssertionError(f"no rest after {limit} steps: {self.net.waiting()}")

    def _wait(self) -> bool:
        """Time passes until an owner asks for free blocks again; False when none waits."""
        wake_s = min((engine._looping.idle_s() for engine in self.engines.values()), default=math.inf)
        if wake_s == math.inf:
            return False
        before_s, self.now_s = self.now_s, self.now_s + wake_s + 1e-6
        if int(before_s) != int(self.now_s):
            for address in list(self.engines):
                self.beat(address)
        return True

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """What holds at every moment."""
        for worker in self.node.fleet.workers.values():
            assert 0 <= worker.held_slots <= self.slots
            assert 0 <= worker.held_kv <= self.kv_blocks * BLOCK_TOKENS
        for engine in self.engines.values():
            for path in engine._looping._former._paths.values():
                assert 0 <= path.in_flight <= path.bound
            free, total = engine._executor.kv_blocks
            assert 0 <= free <= total == self.kv_blocks
        for number, stream in self.streams.items():
            self.taken[number].extend(stream._pending)
            stream._pending.clear()
            got, start = self.taken[number], self.prompts[number]
            assert len(got) <= self.wanted[number]
            if got:
                # Earlier tokens were checked when they came.
                position = start + len(got) - 1
                assert got[-1] == emulated_token(number, position, 256)

    def check_at_rest(self) -> None:
        """What holds when everything was delivered."""
        core = self.node._core
        for worker in self.node.fleet.workers.values():
            assert (worker.held_slots, worker.held_kv) == (0, 0), worker
        assert core.gate.items == 0
        assert core.gate.bytes == 0
        assert [(m.queue, m.in_flight) for m in core.meters] == [(0, 0)] * len(core.meters)
        for address, engine in self.engines.items():
            assert len(engine._looping) == 0, (address, engine._looping._table._held)
            assert engine._looping.reserved == 0, address
            assert not engine._looping._former._sessions
            assert len(engine._single) == 0
            assert not engine._single._parked
            assert engine._ring.ledger.slots == 0, (address, engine._ring.ledger._taken)
            assert all(path.in_flight == 0 for path in engine._looping._former._paths.values())
            assert engine._status.state is WorkerState.READY

    def check_tokens(self) -> None:
        """Every request of the present router has all its tokens, or was cancelled."""
        for number, stream in self.streams.items():
            if number in self.cancelled:
                continue
            assert stream.is_done
            assert stream._refusal is None, stream._refusal
            start = self.prompts[number]
            expected = [emulated_token(number, start + i, 256) for i in range(self.wanted[number])]
            assert self.taken[number] == expected

    def check_answers(self) -> None:
        """Every item of the present router has its answer, or was cancelled."""
        for number, answer in self.answers.items():
            if number not in self.cancelled:
                assert answer.done()
                assert answer.result().payload == self.payloads[number]

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
