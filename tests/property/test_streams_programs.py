"""Answers of the ready programs do not depend on batches, order or company, to the last bit (on a CPU)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keystage.streams.api import Message, Program
from keystage.streams.local import run_local
from keystage.streams.programs import agents, diffusion, language

DIFFUSION = [diffusion.request(f"prompt {i}", 1 + i * 5 % 9, i % 4) for i in range(12)]
LANGUAGE = [
    language.request("hello " * (1 + i % 4), 1 + i * 5 % 11, temperature=i % 3 / 2, seed=i) for i in range(12)
]
AGENTS = [agents.request(f"why {i}", 1 + i * 3 % 5, temperature=i % 2, seed=i) for i in range(6)]


def _latents() -> Program:
    """The diffusion program up to its latents: an image rounds what they differ in."""
    whole = diffusion.program()
    modules = {name: whole.modules[name] for name in ("text", "denoiser")}

    def render(message: Message) -> tuple[bytes, str]:
        return message.data["latent"].numpy().tobytes(), "application/octet-stream"

    return Program("latents", modules, diffusion.TEXT, diffusion.DENOISED, whole.parse, render)


PROGRAMS: dict[str, tuple[Callable[[], Program], list[bytes]]] = {
    "diffusion": (lambda: diffusion.program(image="npy"), DIFFUSION),
    "latents": (_latents, DIFFUSION),
    "language": (language.program, LANGUAGE),
    "agents": (agents.program, AGENTS),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _alone(name: str) -> list[bytes]:
    """The answer of each request when nobody else is there."""
    make, bodies = PROGRAMS[name]
    program = make()
    return [run_local(program, [body], is_strict=True).answers[0].body for body in bodies]


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_batches_do_not_matter(name: str, data: st.DataObject) -> None:
    make, bodies = PROGRAMS[name]
    count = data.draw(st.integers(2, len(bodies)), label="requests")
    chosen = data.draw(st.permutations(range(len(bodies))), label="order")[:count]
    batch = data.draw(st.integers(0, 10), label="largest batch")
    seed = data.draw(st.one_of(st.none(), st.integers(0, 1000)), label="seed")
    program = make()
    run = run_local(program, [bodies[i] for i in chosen], batch=batch, seed=seed, is_strict=True)
    assert [answer.body for answer in run.answers] == [_alone(name)[i] for i in chosen]
    assert all(len(module.state) == 0 for module in program.modules.values())
