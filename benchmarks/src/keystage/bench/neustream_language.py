"""Language programs on emulated devices: one model, or agents in a chain. For `bench neustream`.

Before it: a cell (models, devices, rate, CV, objective, seed). After it: goodput of each agent's decode
module. Agents on one device share its rate: ours in the order of an `EftfQueue` with the SPUs that
Algorithm 2 gave, prefill-first engines as processes that do not know of one another.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from keystage.bench.neustream_models import Language
from keystage.bench.neustream_sessions import Agent, Offer, Session
from keystage.loadgen.arrivals import stream, synthetic
from keystage.streams.eftf import EftfQueue, Turn
from keystage.streams.shared_device import SharedDevice

WARM_RATIO = 0.1
_LENGTHS_STREAM = 78


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of requests at one agent.

    Attributes:
        prompt: mean, lognormal.
        prompt_cv: coefficient of variation.
        output: least and most; `full_ratio` of all reach the most, the others are uniform.
        full_ratio: see `output`.
    """

    prompt: float
    prompt_cv: float
    output: tuple[int, int]
    full_ratio: float

    @property
    def mean_output(self) -> float:
        """Mean tokens generated."""
        low, high = self.output
        return self.full_ratio * high + (1 - self.full_ratio) * (low + high) / 2

    def drawn(self, count: int, random: np.random.RandomState) -> list[tuple[int, int]]:
        """(prompt, output) of each request."""
        spread = math.log(1 + self.prompt_cv**2)
        prompts = random.lognormal(math.log(self.prompt) - spread / 2, math.sqrt(spread), count)
        low, high = self.output
        outputs = np.where(
            random.uniform(size=count) < self.full_ratio, high, random.randint(low, high + 1, count)
        )
        return [(max(4, min(2000, int(p))), int(o)) for p, o in zip(prompts, outputs, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What comes.

    Attributes:
        rate_rps: mean arrival rate.
        cv: of the gaps, gamma.
        first_scale: objective of the first token, as a multiple of the prompt's time alone.
        token_scale: objective of each further one, as a multiple of its time alone.
        requests: how many.
        seed: of arrivals and lengths.
    """

    rate_rps: float
    cv: float
    first_scale: float
    token_scale: float
    requests: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One agent of a chain.

    Attributes:
        model: its times.
        lengths: of its requests.
        device: index of its device.
        make: a new agent.
        spus: SPUs of its modules on the device; None: it shares the device's rate evenly.
    """

    model: Language
    lengths: Lengths
    device: int
    make: Callable[[], Agent]
    spus: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """What became of the requests that count, at one agent.

    Attributes:
        offered: how many came to the program.
        good: whose last token here was in time.
        strict: whose first and last token were.
        seconds: length of the window in which they came.
        prefills: batches, and decodes: batches, with their mean size.
        decodes: see `prefills`.
        mean_batch: sessions of a decode step, mean over steps.
        preempted: sessions put back.
    """

    offered: int
    good: int
    strict: int
    seconds: float
    prefills: int
    decodes: int
    mean_batch: float
    preempted: int

    @property
    def goodput_rps(self) -> float:
        """Good requests a second."""
        return self.good / self.seconds


class _Host:
    """One device and whose modules are on it."""

    def __init__(self, parts: Sequence[tuple[int, Part]], spus: int) -> None:
        self.slots = [(agent, m) for agent, part in parts for m in range(len(part.spus or (1,)))]
        shares = [share for _, part in parts for share in (part.spus or (1,))]
        self.is_ordered = all(part.spus is not None for _, part in parts)
        self.weights = shares if self.is_ordered else [1] * len(shares)
        self.eftf: EftfQueue[Offer] = EftfQueue(self.weights, max(spus, sum(self.weights)))
        self.device = SharedDevice()
        self.turns: dict[int, Turn[Offer]] = {}
        self.alone: dict[int, tuple[int, Offer]] = {}
        self.number = 0

    def is_idle(self, slot: int) -> bool:
        """Whether a module has no batch here."""
        if self.is_ordered:
            return not self.eftf.is_running(slot) and not self.eftf.waiting(slot)
        return all(mine != slot for mine, _ in self.alone.values())

    def put(self, slot: int, offer: Offer, now_s: float) -> None:
        """A batch is formed."""
        if self.is_ordered:
            self.eftf.push(slot, offer, now_s, offer.whole_s)
            return
        self.number += 1
        self.alone[self.number] = (slot, offer)
        self.device.start(self.number, 1, offer.whole_s, now_s)

    def start(self, now_s: float) -> None:
        """What may run now starts."""
        while self.is_ordered and (turn := self.eftf.pop()) is not None:
            self.turns[turn.number] = turn
            self.device.start(turn.number, self.weights[turn.module], turn.whole_s, now_s, turn.finish_s)

    def end_next(self) -> tuple[int, Offer]:
        """The next batch ends."""
        number = self.device.end_next()
        if not self.is_ordered:
            return self.alone.pop(number)
        turn = self.turns.pop(number)
        self.eftf.ended(turn)
        return turn.module, turn.batch


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What became of a chain.

    Attributes:
        tallies: of each agent.
        good: requests that were in time at every agent.
        strict: those whose first tokens were, too.
    """

    tallies: list[Tally]
    good: int
    strict: int


def serve(parts: Sequence[Part], devices_spus: Sequence[int], load: Load) -> Served:
    """Runs a chain of agents until all has ended.

    Args:
        parts: agents, in the order in which a request visits them.
        devices_spus: K of each device.
        load: what comes.

    """
    agents = [part.make() for part in parts]
    hosts = [
        _Host([(i, part) for i, part in enumerate(parts) if part.device == index], spus)
        for index, spus in enumerate(devices_spus)
    ]
    times_s = synthetic(load.rate_rps, load.cv, load.requests / load.rate_rps, load.seed)
    random = stream(load.seed, _LENGTHS_STREAM)
    drawn = [part.lengths.drawn(len(times_s), random) for part in parts]
    coming = [(float(at_s), number, 0) for number, at_s in enumerate(times_s)]
    heapq.heapify(coming)
    sessions: list[list[Session]] = [[] for _ in parts]
    prefills, decodes, rows = ([0] * len(parts) for _ in range(3))
    while True:
        ends_s = [host.device.next_end_s() for host in hosts]
        now_s = min([*ends_s, coming[0][0] if coming else math.inf])
        if now_s == math.inf:
            break
        if coming and coming[0][0] <= now_s:
            _, number, agent = heapq.heappop(coming)
            session = _session(parts[agent], number, now_s, *drawn[agent][number], load)
            sessions[agent].append(session)
            agents[agent].enter(session, now_s)
            touched = parts[agent].device
        else:
            touched = ends_s.index(now_s)
            slot, offer = hosts[touched].end_next()
            agent = hosts[touched].slots[slot][0]
            prefills[agent] += offer.is_prefill
            decodes[agent] += not offer.is_prefill
            rows[agent] += 0 if offer.is_prefill else len(offer.sessions)
            for session in agents[agent].done(offer, now_s):
                if agent + 1 < len(parts):
                    heapq.heappush(coming, (now_s, session.number, agent + 1))
        host = hosts[touched]
        for slot, (agent, module) in enumerate(host.slots):
            if host.is_idle(slot):
                made = agents[agent].offer(module, now_s)
                if made is not None:
                    host.put(slot, made, now_s)
        host.start(now_s)
    warm = int(WARM_RATIO * len(times_s))
    seconds = float(times_s[-1] - times_s[warm])
    tallies = []
    for agent, mine in enumerate(sessions):
        counted = [session for session in mine if session.number >= warm]
        tallies.append(
            Tally(
                len(times_s) - warm,
                sum(session.is_good for session in counted),
                sum(session.is_good and session.is_prompt for session in counted),
                seconds,
                prefills[agent],
                decodes[agent],
                rows[agent] / max(1, decodes[agent]),
                int(getattr(agents[agent], "preempted", 0)),
            )
        )
    # A request that was refused or late somewhere is lost to its user, however quick the other agents were.
    good = [{s.number for s in mine if s.is_good and s.number >= warm} for mine in sessions]
    strict = [{s.number for s in mine if s.is_prompt} for mine in sessions]
    in_time = set.intersection(*good)
    return Served(tallies, len(in_time), len(set.intersection(in_time, *strict)))


def _session(part: Part, number: int, now_s: float, prompt: int, output: int, load: Load) -> Session:
    session = Session(number, now_s, prompt, output)
    first_s, later_s = part.model.alone_s(prompt, output)
    session.due_first_s = now_s + load.first_scale * first_s
    session.token_scale = load.token_scale
    session.due_last_s = session.due_first_s + load.token_scale * later_s
    return session
