"""Stream programs for tests: small exact modules, and random graphs with an oracle of their answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from keystage.streams.api import Message, Program, Stream, StreamModule
from keystage.streams.graph import Join

MODULUS = 1_000_003


class Adding(StreamModule):
    """x' = 31 x + number, exactly; keeps count of visits; goes round as often as the request wants."""

    is_stateful = True

    def __init__(
        self,
        number: int,
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        *,
        loop: str = "",
        join: Join = "any",
    ) -> None:
        super().__init__(inputs, outputs, join=join)
        self.number = number
        self.loop = loop
        self.most = 0

    def compute(self, messages: list[Message]) -> list[Message]:
        assert len({message.request for message in messages}) == len(messages)
        found = []
        for message in messages:
            visits = self.state.get(message.request, "visits", 0) + 1
            self.state.put(message.request, "visits", visits)
            x = (message.data["x"] * 31 + self.number) % MODULUS
            found.append(message.next({"x": x}, visits=visits))
        self.most = max(self.most, len(messages))
        return found

    def scatter(self, message: Message) -> str | Sequence[str]:
        if self.loop and message.header["visits"] < rounds(message.header["x0"], self.number):
            return self.loop
        return [stream.name for stream in self.outputs if stream.name != self.loop]


def rounds(x0: int, number: int) -> int:
    """How often a request goes round a loop."""
    return (x0 + number) % 4 + 1


def parse(body: bytes, content_type: str) -> Message:
    """A whole number."""
    del content_type
    number: int = msgspec.json.decode(body, type=int)
    return Message({"x0": number}, {"x": torch.tensor(number)})


def render(message: Message) -> tuple[bytes, str]:
    """The number."""
    return msgspec.json.encode(int(message.data["x"])), "application/json"


def simple(
    modules: Mapping[str, StreamModule], entry: str = "in", leave: str = "out", **more: Any
) -> Program:
    """A program over the modules with this module's parse and render."""
    return Program("test", modules, Stream(entry), Stream(leave), parse, render, **more)


@dataclass
class RandomProgram:
    """Blocks one after another: plain modules, loops of one or two, forks that are joined."""

    choose: random.Random
    modules: dict[str, StreamModule] = field(default_factory=dict)
    plan: list[Any] = field(default_factory=list)
    streams: int = 0

    @classmethod
    def of(cls, seed: int, blocks: int) -> RandomProgram:
        """Draws one."""
        made = cls(random.Random(seed))
        stream = Stream("in")
        for place in range(blocks):
            out = Stream("out") if place == blocks - 1 else made._stream()
            made.plan.append(made._block(stream, out, deep=True))
            stream = out
        names = list(made.modules)
        made.choose.shuffle(names)
        made.modules = {name: made.modules[name] for name in names}
        return made

    def program(self) -> Program:
        """A fresh program: modules keep state, so each run gets its own."""
        return simple({name: _copy(module) for name, module in self.modules.items()})

    def answer(self, x0: int) -> tuple[int, Counter[str]]:
        """What a request must give, and how often it visits each module."""
        visits: Counter[str] = Counter()
        x = x0
        for block in self.plan:
            x = self._follow(block, x, x0, visits)
        return x, visits

    def _stream(self) -> Stream:
        self.streams += 1
        return Stream(f"s{self.streams}")

    def _add(self, inputs: Sequence[Stream], outputs: Sequence[Stream], **more: Any) -> str:
        number = len(self.modules)
        self.modules[f"m{number}"] = Adding(number, inputs, outputs, **more)
        return f"m{number}"

    def _block(self, stream: Stream, out: Stream, *, deep: bool) -> Any:
        kind = self.choose.choice(["plain", "loop", "pair", *(["fork"] if deep else [])])
        if kind == "plain":
            return ["plain", self._add([stream], [out])]
        if kind == "loop":
            return ["loop", self._add([stream], [stream, out], loop=stream.name)]
        if kind == "pair":
            between = self._stream()
            return [
                "pair",
                self._add([stream], [between]),
                self._add([between], [out, stream], loop=stream.name),
            ]
        count = self.choose.randint(2, 3)
        ways = [self._stream() for _ in range(count)]
        ends = [self._stream() for _ in range(count)]
        fork = self._add([stream], ways)
        branches = [self._block(way, end, deep=False) for way, end in zip(ways, ends, strict=True)]
        return ["fork", fork, branches, self._add(ends, [out], join="all")]

    def _follow(self, block: Any, x: int, x0: int, visits: Counter[str]) -> int:
        def visit(name: str, x: int) -> int:
            visits[name] += 1
            module = self.modules[name]
            assert isinstance(module, Adding)
            return (x * 31 + module.number) % MODULUS

        match block:
            case ["plain", name]:
                return visit(name, x)
            case ["loop", name]:
                for _ in range(rounds(x0, self._number(name))):
                    x = visit(name, x)
                return x
            case ["pair", first, second]:
                for _ in range(rounds(x0, self._number(second))):
                    x = visit(second, visit(first, x))
                return x
            case ["fork", fork, branches, join]:
                x = visit(fork, x)
                return visit(join, sum(self._follow(branch, x, x0, visits) for branch in branches))
        raise AssertionError(block)

    def _number(self, name: str) -> int:
        module = self.modules[name]
        assert isinstance(module, Adding)
        return module.number


def _copy(module: StreamModule) -> StreamModule:
    assert isinstance(module, Adding)
    return Adding(module.number, module.inputs, module.outputs, loop=module.loop, join=module.join)
