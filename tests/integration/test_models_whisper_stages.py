"""Whisper's stages run one after another equal the unsplit model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from support.tiny_whisper import FRAMES, START, Chain, greedy, sound, spectrum, tiny_model, write_folder

from keystage.bundle import store
from keystage.bundle.errors import SplitError
from keystage.bundle.split import split
from keystage.models.base import Row, StageError
from keystage.models.families import family_of
from keystage.models.loading import build_stage, read_stage, warm_up
from keystage.models.whisper_mel import log_mel
from keystage.worker.executor import StageError as ExecutorError
from keystage.worker.torch_executor import TorchExecutor

PROMPT = [START, 7, 9, 11]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(model, tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    return Chain(split(folder, 4, "uniform", folder.parent / "four", "tiny"))


def logits_of(model: Any, samples: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found = model(input_features=spectrum(model, samples), decoder_input_ids=torch.tensor([ids]))
    logits: torch.Tensor = found.logits[0]
    return logits


@pytest.mark.parametrize(("mels", "seconds"), [(80, 30.0), (80, 12.3), (128, 0.1), (80, 31.0)])
def test_the_spectrogram_is_that_of_transformers(mels: int, seconds: float) -> None:
    from transformers import WhisperFeatureExtractor

    samples = sound(3, seconds)
    wanted = WhisperFeatureExtractor(mels)(samples, sampling_rate=16_000, return_tensors="pt").input_features[
        0
    ]
    torch.testing.assert_close(log_mel(torch.from_numpy(samples), mels, 480_000), wanted, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("method", ["uniform", "parameters"])
def test_every_split_says_what_the_whole_model_says(
    model: Any, folder: Path, tmp_path: Path, stages: int, method: str
) -> None:
    chain = Chain(split(folder, stages, method, tmp_path / "bundle", "tiny"))
    assert [chain.pipeline.stages[0].layers[0], chain.pipeline.stages[-1].layers[1]] == [0, 6]
    for seed in (2, 3):
        samples = sound(seed)
        expected = greedy(model, samples, PROMPT, 20)
        assert chain.generate(samples, PROMPT, len(expected)) == expected
        assert len(set(expected)) > 3


@pytest.mark.parametrize(
    "changes",
    [{"num_mel_bins": 24, "encoder_layers": 1, "decoder_layers": 1}, {"decoder_layers": 2, "d_model": 24}],
)
def test_variants_say_what_the_whole_model_says(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**changes)
    chain = Chain(split(write_folder(model, tmp_path / "model"), 2, "uniform", tmp_path / "bundle", "tiny"))
    expected = greedy(model, sound(2), PROMPT, 12)
    assert chain.generate(sound(2), PROMPT, len(expected)) == expected


def test_openings_chunks_and_decodes_mix_in_a_wave(model: Any, chain: Chain) -> None:
    first, second, third = [*PROMPT, 40, 41, 42, 43, 44], [*PROMPT[:1], 50, 51], [START, 60, 61, 62, 63, 64]
    known = {7: (first, sound(1)), 3: (second, sound(2, 0.3)), 5: (third, sound(3))}
    for slot, (ids, samples) in known.items():
        chain.open(slot, len(ids), samples)
    # Each wave: (slot, first token, tokens); 0 opens.
    waves = [
        [(7, 0, 4)],
        [(3, 0, 1), (7, 4, 1), (5, 0, 2)],
        [(5, 2, 3), (3, 1, 1)],
        [(7, 5, 4), (5, 5, 1), (3, 2, 1)],
    ]
    expected = {slot: logits_of(model, samples, ids) for slot, (ids, samples) in known.items()}
    for wave in waves:
        ids: list[int] = []
        rows: list[Row] = []
        for slot, start, count in wave:
            front = [0] * FRAMES if start == 0 else []
            ids += front + known[slot][0][start : start + count]
            rows.append(Row(slot, start + FRAMES if start else 0, count + len(front)))
        found = chain.forward(ids, rows, range(len(rows)))
        wanted = torch.stack([expected[slot][start + count - 1] for slot, start, count in wave])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_session_without_input_hears_silence(model: Any, chain: Chain) -> None:
    silence = sound(1) * 0
    expected = greedy(model, silence, PROMPT, 8)
    chain.open(0, 12)
    ids, row = chain.opening(0, PROMPT)
    assert int(chain.forward(ids, [row], [0])[0].argmax()) == expected[0]


def test_tokens_that_must_not_be_chosen_are_those_of_transformers(
    model: Any, folder: Path, tmp_path: Path
) -> None:
    free = greedy(model, sound(2), PROMPT, 12)
    generation = {
        "suppress_tokens": [-1, free[1]],
        "begin_suppress_tokens": [free[0]],
        "decoder_start_token_id": START,
    }
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write_folder(model, tmp_path, generation)
    chain = Chain(split(tmp_path, 3, "uniform", tmp_path / "bundle", "tiny"))
    found = chain.generate(sound(2), PROMPT, 12)
    model.generation_config.suppress_tokens = [free[1]]
    model.generation_config.begin_suppress_tokens = [free[0]]
    wanted = model.generate(
        spectrum(model, sound(2)),
        decoder_input_ids=torch.tensor([PROMPT]),
        max_new_tokens=12,
        do_sample=False,
    )
    expected = wanted[0].tolist()
    expected = expected[len(PROMPT) :] if expected[: len(PROMPT)] == PROMPT else expected
    assert found[: len(expected)] == expected
    assert free[1] not in found
    assert found[0] != free[0]
    assert free[0] in found[1:] or free[0] == free[1]


def test_a_replay_opens_with_the_same_row_and_goes_on(chain: Chain) -> None:
    samples = sound(2)
    whole = chain.generate(samples, PROMPT, 10)
    chain.open(4, 14, samples)
    ids, row = chain.opening(4, PROMPT)
    chain.forward(ids, [row], [])
    again = chain.forward(whole[:6], [Row(4, FRAMES + 4, 6)], [0])
    assert int(again[0].argmax()) == whole[6]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(1, 0, FRAMES), "begins or ends among the 50 positions of frames"),
        (Row(1, 0, 1), "begins or ends among"),
        (Row(1, FRAMES, 1), "begins or ends among"),
        (Row(1, FRAMES + 3, 1), "starts at position 3, the slot holds 2"),
        (Row(1, FRAMES + 2, 7), "9 tokens do not fit a capacity of 8"),
        (Row(9, 0, FRAMES + 1), "slot 9 is not open"),
    ],
)
def test_impossible_rows_are_refused_and_change_nothing(chain: Chain, row: Row, message: str) -> None:
    chain.open(1, 8, sound(1))
    ids, opening = chain.opening(1, PROMPT[:2])
    chain.forward(ids, [opening], [0])
    with pytest.raises(StageError, match=message):
        chain.forward([1] * row.count, [row], [0])
    chain.forward([6], [Row(1, FRAMES + 2, 1)], [0])


def test_bounds_of_capacity_input_and_ids(chain: Chain) -> None:
    stage: Any = chain.stages[0]
    for capacity in (FRAMES, FRAMES + 41):
        with pytest.raises(StageError, match=f"51 to 90 positions .50 of frames., got {capacity}"):
            stage.open(1, capacity)
    stage.open(1, FRAMES + 2)
    for length in (4 * 16_001, 6):
        with pytest.raises(StageError, match=f"at most 64000 bytes, 4 a sample, got {length}"):
            stage.take_input(1, bytes(length))
    with pytest.raises(StageError, match="97, the vocabulary is 0 to 96"):
        stage.forward(torch.tensor([0] * FRAMES + [97]), [Row(1, 0, FRAMES + 1)], [])
    with pytest.raises(StageError, match=r"shape \(3,\), \(51,\) expected"):
        stage.forward(torch.tensor([0] * 3), [Row(1, 0, FRAMES + 1)], [])


def test_a_wave_of_nobody_passes(chain: Chain) -> None:
    assert chain.forward([], [], []).shape == (0, 97)


def test_warm_up_leaves_sessions_alone(chain: Chain) -> None:
    expected = chain.generate(sound(1), PROMPT, 6)
    chain.open(1, 10, sound(1))
    ids, row = chain.opening(1, PROMPT)
    chain.forward(ids, [row], [])
    for stage in chain.stages:
        warm_up(stage)
    found = chain.forward(expected[:5], [Row(1, FRAMES + 4, 5)], [0])
    assert int(found[0].argmax()) == expected[5]


def test_kv_bytes_per_position(chain: Chain) -> None:
    # Stages of 2, 2, 1 and 1 layers, 3 of them decoder layers; an encoder stage holds a frame.
    layers = [stage.role.end_layer - max(3, stage.role.first_layer) for stage in chain.stages]
    expected = [max(2 * count, 1) * 48 * 4 for count in layers]
    assert [stage.kv_token_bytes for stage in chain.stages] == expected


def test_a_stage_alone_takes_ids_and_sound_over_http(model: Any, folder: Path, tmp_path: Path) -> None:
    bundle = split(folder, 1, "uniform", tmp_path / "bundle", "tiny")
    pipeline = store.load(bundle)
    executor = TorchExecutor(bundle, pipeline, [0], "cpu", "float32", 1)
    executor.first_forward()
    ids = torch.tensor([0] * FRAMES + PROMPT)
    samples = torch.from_numpy(sound(2))
    silence = sound(2) * 0
    for tensors, heard in (
        ({"ids": ids, "input": samples}, sound(2)),
        ({"ids": ids, "input": samples[:0]}, silence),
        ({"ids": ids}, silence),
    ):
        found = load(executor.single(save(tensors)))["logits"][0]
        torch.testing.assert_close(found, logits_of(model, heard, PROMPT)[-1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ExecutorError, match="at most 64000 bytes, 4 a sample, got 64004"):
        executor.single(save({"ids": ids, "input": torch.zeros(16_001)}))


class Made:
    """Hands on the tensors that another build of the same stage made, in their order (`shared.Ready`)."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.left = list(tensors)

    def __call__(self, tensor: torch.Tensor) -> None:
        raise AssertionError("nothing is made twice")

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        found = self.left.pop(0)
        assert tuple(found.shape) == shape
        return found


@pytest.mark.parametrize("stages", [1, 3])
def test_a_stage_made_of_ready_tensors_says_the_same(folder: Path, tmp_path: Path, stages: int) -> None:
    bundle = split(folder, stages, "uniform", tmp_path / "bundle", "tiny")
    chain = Chain(bundle)
    expected = chain.generate(sound(2), PROMPT, 6)
    ready: list[Any] = []
    for index in range(stages):
        kept: list[torch.Tensor] = []
        build_stage(chain.pipeline, index, read_stage(bundle, chain.pipeline, index), share=kept.append)
        made = Made(kept)
        tensors = read_stage(bundle, chain.pipeline, index)
        ready.append(build_stage(chain.pipeline, index, tensors, share=made))
        assert not made.left
    chain.stages = ready
    assert chain.generate(sound(2), PROMPT, 6) == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_fp32(model: Any, folder: Path, tmp_path: Path, dtype: str) -> None:
    half = Chain(split(folder, 2, "uniform", tmp_path / "half", "tiny", dtype))
    half.open(0, 8, sound(1))
    ids, row = half.opening(0, PROMPT)
    found = half.forward(ids, [row], [0])[0]
    expected = logits_of(model, sound(1), PROMPT)[-1]
    assert torch.nn.functional.cosine_similarity(found, expected, 0) > 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 50}, "no multiple of 4 heads"),
        ({"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ({"scale_embedding": True}, "scale_embedding = True is not supported"),
        ({"encoder_layers": 0}, "encoder_layers must be a whole number from 1 to 10000, got 0"),
        ({"suppress_tokens": [97]}, "suppress_tokens names token 97, the vocabulary has 97"),
        ({"begin_suppress_tokens": "x"}, "begin_suppress_tokens must be a list of token ids"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(model: Any, change: dict[str, Any], message: str) -> None:
    config = {**model.config.to_dict(), "architectures": ["WhisperForConditionalGeneration"], **change}
    with pytest.raises(SplitError, match=message):
        family_of(config).shape(config)
