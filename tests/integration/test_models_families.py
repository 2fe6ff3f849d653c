"""Every decoder family, cut into stages, equals the unsplit model in transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_decoders import VARIANTS, VOCAB, decoder
from support.tiny_llama import Chain, write_folder

from keystage.bundle import store
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.split import split
from keystage.models.base import Row, StageError
from keystage.models.loading import build_stage, read_stage
from keystage.models.single_pass import looping_stage

ONE_EACH = ("mistral-window", "qwen2", "qwen3", "opt", "gpt2")
"""A variant of every architecture."""


def bundle_of(variant: str, place: Path, stages: int = 2, dtype: str = "fp32", **changes: Any) -> Path:
    folder = write_folder(decoder(variant, **changes), place / "model")
    return split(folder, stages, "parameters", place / "bundle", "tiny", dtype)


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def logits_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_prefill_mixed_with_decode_equals_the_whole_model(
    variant: str, stages: int, tmp_path: Path
) -> None:
    model = decoder(variant)
    chain = Chain(bundle_of(variant, tmp_path, stages))
    first, second, third = ids_of(60, 1), ids_of(50, 2), ids_of(9, 3)
    chain.open(7, 100)
    chain.open(3, 64)
    chain.open(5, 9)
    waves = [
        [(7, first, 0, 20)],
        [(7, first, 20, 1), (3, second, 0, 17)],
        [(3, second, 17, 30), (7, first, 21, 38), (5, third, 0, 1)],
        [(5, third, 1, 1), (3, second, 47, 3), (7, first, 59, 1)],
        [(5, third, 2, 7)],
    ]
    expected = {7: logits_of(model, first), 3: logits_of(model, second), 5: logits_of(model, third)}
    for wave in waves:
        ids = [token for _, tokens, start, count in wave for token in tokens[start : start + count]]
        rows = [Row(slot, start, count) for slot, _, start, count in wave]
        found = chain.forward(ids, rows, range(len(rows)))
        wanted = torch.stack([expected[slot][start + count - 1] for slot, _, start, count in wave])
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ONE_EACH)
def test_greedy_tokens_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = decoder(variant)
    model.generation_config.eos_token_id = None
    chain = Chain(bundle_of(variant, tmp_path, 4))
    prompts = [ids_of(11, 4), ids_of(1, 5), ids_of(24, 6)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
            )
        expected.append(whole[0, len(prompt) :].tolist())
    assert chain.generate(prompts, 16) == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", ONE_EACH)
def test_half_precision_is_as_near_to_fp32_as_transformers_is(
    variant: str, dtype: str, tmp_path: Path
) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    chain = Chain(bundle_of(variant, tmp_path, 3, dtype))
    assert {stage.dtype for stage in chain.stages} == {kind}
    ids = ids_of(40, 7)
    chain.open(0, 40)
    found = [chain.forward(ids[:25], [Row(0, 0, 25)], [0])]
    found += [chain.forward([ids[at]], [Row(0, at, 1)], [0]) for at in range(25, 40)]
    half = decoder(variant).to(kind)
    theirs = logits_of(half, ids)[24:]
    exact = logits_of(half.float(), ids)[24:]
    assert (torch.cat(found) - exact).norm() < 1.5 * (theirs - exact).norm()


def test_a_window_forgets_what_lies_before_it(tmp_path: Path) -> None:
    wide, narrow = (
        Chain(bundle_of("mistral", tmp_path / str(window), sliding_window=window)) for window in (None, 8)
    )
    ids = ids_of(30, 8)
    for chain in (wide, narrow):
        chain.open(0, 30)
    assert not torch.allclose(*(chain.forward(ids, [Row(0, 0, 30)], [0]) for chain in (wide, narrow)))


def test_gpt2_matrices_are_turned_and_both_kinds_of_names_are_read(tmp_path: Path) -> None:
    bundle = bundle_of("gpt2", tmp_path / "full")
    source = load_file(tmp_path / "full" / "model" / "model.safetensors")
    held = load_file(bundle / "stage-00.safetensors")
    for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"transformer.h.0.{part}.weight"
        assert torch.equal(held[name], source[name].t())
    short = tmp_path / "short"
    folder = write_folder(decoder("gpt2"), short / "model")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in source.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128) for layer in range(4)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(4)}
    save_file({**bare, **masks}, folder / "model.safetensors")
    again = split(folder, 2, "parameters", short / "bundle", "tiny")
    assert [s.identity for s in store.load(again).stages] == [s.identity for s in store.load(bundle).stages]
    save_file(
        {**source, "wte.weight": source["transformer.wte.weight"].clone()}, folder / "model.safetensors"
    )
    with pytest.raises(SplitError, match=r"parameter wte\.weight .* belongs to no stage"):
        split(folder, 2, "parameters", short / "bundle", "tiny")


def test_opt_files_of_the_base_model_are_read(tmp_path: Path) -> None:
    bundle = bundle_of("opt", tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(bare, path)
    again = split(tmp_path / "model", 2, "parameters", tmp_path / "again", "tiny")
    assert [s.identity for s in store.load(again).stages] == [s.identity for s in store.load(bundle).stages]


class Recorded:
    """A `Keep` that remembers."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)


class Given:
    """A `Ready` that gives what another stage has made."""

    def __init__(self, recorded: Recorded) -> None:
        self._rest = list(recorded.tensors)

    def __call__(self, tensor: torch.Tensor) -> None:
        raise AssertionError(f"a tensor of shape {list(tensor.shape)} was made again")

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._rest.pop(0)
        assert tuple(tensor.shape) == shape
        return tensor

    @property
    def rest(self) -> int:
        return len(self._rest)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("variant", [*ONE_EACH, "gpt2-untied", "opt-without-bias"])
def test_a_stage_uses_what_another_has_made_in_the_same_order(
    variant: str, stages: int, tmp_path: Path
) -> None:
    bundle = bundle_of(variant, tmp_path, stages)
    pipeline = store.load(bundle)
    ids = torch.tensor(ids_of(5, 9))
    for index in range(stages):
        recorded = Recorded()
        tensors = read_stage(bundle, pipeline, index)
        first = looping_stage(build_stage(pipeline, index, tensors, share=recorded))
        given = Given(recorded)
        second = looping_stage(build_stage(pipeline, index, tensors, share=given))
        assert given.rest == 0
        x = ids if index == 0 else torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
        for stage in (first, second):
            stage.open(0, 5)
        left, right = (stage.forward(x, [Row(0, 0, 5)], [0]) for stage in (first, second))
        assert torch.equal(left, right)


@pytest.mark.parametrize("variant", [*ONE_EACH, "gpt2-untied", "qwen3-biased"])
def test_a_stage_built_before_its_parameters_are_there_uses_them_in_place(
    variant: str, tmp_path: Path
) -> None:
    bundle = bundle_of(variant, tmp_path, 3, "fp16")  # a type that is not packed, as on a GPU
    pipeline = store.load(bundle)
    for index in range(3):
        tensors = read_stage(bundle, pipeline, index)
        filled = looping_stage(build_stage(pipeline, index, tensors))
        arena = torch.empty(0, dtype=torch.uint8).set_(next(iter(tensors.values())).untyped_storage())
        assert {t.untyped_storage().data_ptr() for t in tensors.values()} == {arena.data_ptr()}
        kept = arena.clone()
        arena.zero_()
        early = looping_stage(build_stage(pipeline, index, tensors, share=Recorded()))
        arena.copy_(kept)
        x = torch.tensor(ids_of(5, 9)) if index == 0 else torch.linspace(-1, 1, 5 * 48).view(5, 48).half()
        for stage in (filled, early):
            stage.open(0, 5)
        left, right = (stage.forward(x, [Row(0, 0, 5)], [0]) for stage in (filled, early))
        assert torch.equal(left, right)


def test_end_tokens_come_from_the_config(tmp_path: Path) -> None:
    for variant in ("opt", "gpt2", "qwen3"):
        assert store.load(bundle_of(variant, tmp_path / variant)).eos == [2]
    assert store.load(bundle_of("gpt2", tmp_path / "more", eos_token_id=[5, 9])).eos == [5, 9]


def test_learned_positions_end_with_the_context(tmp_path: Path) -> None:
    chain = Chain(bundle_of("opt", tmp_path))
    ids = ids_of(128, 10)
    chain.open(0, 128)
    chain.forward(ids[:127], [Row(0, 0, 127)], [])
    found = chain.forward(ids[127:], [Row(0, 127, 1)], [0])
    torch.testing.assert_close(found[0], logits_of(decoder("opt"), ids)[-1], atol=2e-4, rtol=2e-4)
    with pytest.raises(StageError, match="1 to 128 tokens, got 129"):
        chain.open(0, 129)


@pytest.mark.parametrize("method", ["uniform", "parameters", "time"])
@pytest.mark.parametrize("variant", ["opt", "gpt2"])
def test_every_method_splits_every_family(method: str, variant: str, tmp_path: Path) -> None:
    folder = write_folder(decoder(variant), tmp_path / "model")
    pipeline = store.load(split(folder, 3, method, tmp_path / "bundle", "tiny"))
    bounds = [stage.layers for stage in pipeline.stages]
    assert (bounds[0][0], bounds[-1][1], pipeline.family, pipeline.execution) == (0, 4, variant, "looping")


def test_a_stage_whose_matrix_is_not_turned_is_refused(tmp_path: Path) -> None:
    bundle = bundle_of("gpt2", tmp_path)
    pipeline = store.load(bundle)
    tensors = read_stage(bundle, pipeline, 0)
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = tensors[name].t()
    with pytest.raises(BundleError, match=r"\[192, 48\] expected, \[48, 192\] found"):
        build_stage(pipeline, 0, tensors)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False is not supported for opt"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32 .* it must be hidden_size, 48"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True is not"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
        ("opt", {"activation_function": "tanh"}, "activation_function = 'tanh' is not supported for opt"),
        ("opt", {"enable_bias": 1}, "enable_bias must be true or false, got 1"),
        ("opt", {"num_attention_heads": 7}, "hidden_size 48 is no multiple of 7 heads"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not supported for gpt2"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2", {"n_embd": None}, "n_embd must be a whole number from 1 to 2147483647, got None"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number from 1 to 2147483647, got"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("qwen2",
         {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "layer_types": None},
         "a sliding window in 2 of 4 layers is not supported for llama: .*, max_window_layers = 2"),
        ("qwen3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
         "a sliding window in 2 of 4 layers .* use_sliding_window = False"),
        ("qwen3", {"num_key_value_heads": 4}, "6 heads are no multiple of 4"),
        ("qwen3", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("yarn", {"rope_parameters": {"rope_type": "yarn", "factor": -1.0}}, "factor must be a number above"),
        ("yarn", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("yarn", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
         "partial_rotary_factor = 0.25"),
        ("yarn", {"sliding_window": 9}, "sliding_window = 9 is not supported for llama"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    variant: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder(decoder(variant), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(SplitError, match=message):
        split(folder, 2, "uniform", tmp_path / "bundle", "tiny")
