"""Targets of models and bundles: descriptions, parameters in every format, tokenizers, configurations."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fuzz.target import UNREADABLE, FuzzError, Ready


def pipeline_json(scratch: Path) -> Ready:
    """`pipeline.json`, as router, worker and controller read it; what is read is written and read again."""
    from keystage.bundle.api import emulated
    from keystage.bundle.errors import BundleError
    from keystage.bundle.store import PIPELINE_FILE, decode, load, write

    def run(data: bytes) -> None:
        pipeline = decode(data, Path(PIPELINE_FILE))
        write(scratch, pipeline)
        if load(scratch) != pipeline and b"ull" not in data:
            raise FuzzError("a description changes when it is written")

    seeds = [msgspec.json.encode(emulated("a", 3, execution=kind)) for kind in ("looping", "single-pass")]
    return Ready(run, (BundleError,), (*seeds, _program(scratch)))


def _program(scratch: Path) -> bytes:
    from keystage.bundle.program import bundle_program

    bundle_program("program:diffusion", scratch / "p", "p")
    return (scratch / "p" / "pipeline.json").read_bytes()


def bundle_files(scratch: Path) -> Ready:
    """A stage's file beside its description: whatever is altered is refused, before a parameter is used."""
    import torch

    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.split import split
    from keystage.bundle.store import load
    from keystage.models.base import StageError
    from keystage.models.loading import load_stage

    torch.set_num_threads(1)
    folder = split("random:llama-tiny", 2, "uniform", scratch / "b", "b", "fp32", force=True)
    pipeline = load(folder)
    file = folder / pipeline.stages[0].file
    good = file.read_bytes()

    def run(data: bytes) -> None:
        # What differs stands in the input: an offset, what is there, and whether hashes are checked.
        at = int.from_bytes(data[:4], "little") % len(good)
        changed = good[:at] + data[5:] + good[at + len(data[5:]) :]
        file.write_bytes(changed)
        is_checked = bool(data[4:5] > b"\x7f")
        stage = load_stage(folder, pipeline, 0, check=is_checked)
        if is_checked and changed != good:
            raise FuzzError("an altered file was taken")
        del stage

    return Ready(
        run,
        (BundleError, SplitError, StageError),
        (b"\0\0\0\0\0", b"\0\0\0\0\xff\xff\xff\xff\xff", b"\x10\0\0\0\0\x22", b"\x80\0\0\0\xff\0\0"),
    )


def safetensors_header(scratch: Path) -> Ready:
    """Headers in memory, as the router reads them of a request, and in files, as a split does."""
    from keystage.bundle.errors import BundleError
    from keystage.bundle.safetensors_file import header_bytes, header_in, parse_header

    file = scratch / "model.safetensors"

    def run(data: bytes) -> None:
        raw = len(data).to_bytes(8, "little") + data if data[:1] == b"{" else data
        header = header_in(Path("body"), memoryview(raw))
        file.write_bytes(raw)
        if parse_header(file) != header:
            raise FuzzError("a file says other than its bytes")
        for entry in header.tensors.values():
            if header.data_start + entry.data_offsets[1] > len(raw):
                raise FuzzError(f"{entry} lies beyond {len(raw)} bytes")

    good = header_bytes({"a": (0, 3), "b": (0,)}, "float32")
    plain = b'{"__metadata__":{"a":"b"},"x":{"dtype":"F16","shape":[2,0],"data_offsets":[0,0]}}'
    return Ready(run, (BundleError,), (good, good[8:], plain, (1 << 60).to_bytes(8, "little") + b"{}"))


def model_folder(scratch: Path) -> Ready:
    """A Hugging Face style folder: every JSON file in it, from opening to the vocabulary."""
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.safetensors_file import header_bytes
    from keystage.bundle.source import open_source
    from keystage.models.families import family_of

    folder = scratch / "model"
    out = scratch / "out"
    out.mkdir(exist_ok=True)

    def run(data: bytes) -> None:
        files = json.loads(data.decode("utf-8", "surrogatepass"))
        if not isinstance(files, dict):
            return
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "1_Pooling").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(header_bytes({"x": (0, 2)}, "float32"))
        for name, content in files.items():
            if name in _FILES:
                text = json.dumps(content, ensure_ascii=False)
                (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        source = open_source(folder)
        source.shapes()
        config = source.config()
        source.write_vocabulary(out)
        family_of(config).shape(config)

    llama = {"architectures": ["LlamaForCausalLM"], **_LLAMA, "eos_token_id": [2, 3]}
    seeds = [
        {
            "config.json": llama,
            "generation_config.json": {"eos_token_id": 2},
            "tokenizer.json": {"added_tokens": [{"id": 2, "content": "</s>"}], "post_processor": None},
            "tokenizer_config.json": {
                "bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True,
                "chat_template": [{"name": "default", "template": "x"}],
            },
            "model.safetensors.index.json": {"weight_map": {"x": "model.safetensors"}},
        },
        {
            "config.json": {"architectures": ["BertModel"], **_BERT},
            "modules.json": [
                {"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"},
                {"type": "Normalize", "path": "2_Normalize"},
            ],
            "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
            "sentence_bert_config.json": {"max_seq_length": 12},
        },
        {
            "config.json": {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
            **_WHISPER},
            "generation_config.json": {"suppress_tokens": [1, 2], "begin_suppress_tokens": [3]},
        },
    ]  # fmt: skip
    refusals = (SplitError, BundleError, *UNREADABLE, json.JSONDecodeError, OSError)
    return Ready(run, refusals, tuple(json.dumps(seed).encode() for seed in seeds))


_FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
    "1_Pooling/config.json", "sentence_bert_config.json", "model.safetensors.index.json",
}  # fmt: skip
_LLAMA = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
_BERT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
}  # fmt: skip
_WHISPER = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "vocab_size": 97,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "num_mel_bins": 80,
    "max_source_positions": 100, "max_target_positions": 40,
}  # fmt: skip
_OPT = {
    "vocab_size": 97, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "max_position_embeddings": 128, "word_embed_proj_dim": 48, "activation_function": "relu",
}  # fmt: skip
_GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 4, "n_head": 6, "n_positions": 128, "n_inner": None}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1,
}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: tuple[Mapping[str, Any], ...] = (
    {"architectures": ["LlamaForCausalLM"], **_LLAMA, "rope_scaling": _LLAMA3},
    {"architectures": ["MistralForCausalLM"], **_LLAMA, "sliding_window": 8},
    {
        "architectures": ["Qwen2ForCausalLM"], **_LLAMA, "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 0, "layer_types": ["sliding_attention"] * 4, "rope_parameters": _YARN,
    },
    {"architectures": ["Qwen3ForCausalLM"], **_LLAMA, "head_dim": 16, "attention_bias": True},
    {"architectures": ["OPTForCausalLM"], **_OPT},
    {"architectures": ["GPT2LMHeadModel"], **_GPT2},
    {"architectures": ["BertModel"], **_BERT, "sentence_transformers": {"pooling": "cls", "max_tokens": 9}},
    {"architectures": ["BertForMaskedLM"], **_BERT},
    {
        "architectures": ["WhisperForConditionalGeneration"], **_WHISPER,
        "generation": {"suppress_tokens": [1]},
        "suppress_tokens": [2],
    },
    {"architectures": ["WideResNet"], "layers": [1, 1, 1, 1], "num_classes": 7, "image_size": 32},
    {"architectures": ["StreamProgram"], "tensors": [[["w", [2, 3]]], []]},
)  # fmt: skip


def model_config(scratch: Path) -> Ready:
    """`config.json` of every family: sizes, then the parameters of a first, a middle and a last stage."""
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.models.base import StageRole
    from keystage.models.families import family_of

    def run(data: bytes) -> None:
        config = msgspec.json.decode(data, type=dict[str, Any])
        family = family_of(config)
        shape = family.shape(config)
        if min(shape.layers, shape.hidden_size, shape.vocab_size, shape.context_length) < 0:
            raise FuzzError(f"{shape}")
        family.end_parameters(config)
        last = min(shape.layers, 4)
        for role in (StageRole(0, last, True, False), StageRole(last - 1, last, False, True)):
            if shape.layers:
                family.stage_tensors(config, role)

    seeds = tuple(json.dumps(config).encode() for config in CONFIGS)
    return Ready(run, (SplitError, BundleError, *UNREADABLE), seeds)


def gguf_file(scratch: Path) -> Ready:
    """A GGUF file: metadata, tensors, vocabulary."""
    import gguf
    import numpy as np
    from transformers import AutoTokenizer  # noqa: F401  # torch and all: its time and memory are no input's

    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.source_gguf import GgufSource
    from keystage.models.families import family_of

    file = scratch / "m.gguf"
    out = scratch / "out"
    out.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (
        ("embedding_length", 8), ("feed_forward_length", 8), ("context_length", 16), ("block_count", 1),
        ("attention.head_count", 2), ("attention.head_count_kv", 1),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<e>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    for name, shape in (
        ("token_embd.weight", (4, 8)),
        ("blk.0.attn_q.weight", (8, 8)),
        ("output_norm.weight", (8,)),
    ):
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    good = file.read_bytes()

    def run(data: bytes) -> None:
        file.write_bytes(data)
        source = GgufSource(file)
        config = source.config()
        for name in list(source.shapes())[:4]:
            source.read(name)
        source.write_vocabulary(out)
        family_of(config).shape(config)

    return Ready(run, (SplitError, BundleError), (good,))


def ctranslate2(scratch: Path) -> Ready:
    """A CTranslate2 model's list of arrays, and what stands beside it."""
    import torch  # noqa: F401  # its memory is no growth

    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.source_ctranslate2 import MODEL_FILE, Ctranslate2Source

    folder = scratch / "ct2"
    folder.mkdir(exist_ok=True)
    out = scratch / "out"
    out.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"suppress_ids": [1]}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<|endoftext|>"}]}')

    def text(word: str) -> bytes:
        raw = word.encode() + b"\0"
        return struct.pack("<H", len(raw)) + raw

    def array(name: str, shape: tuple[int, ...], kind: int, item: int) -> bytes:
        count = 1
        for size in shape:
            count *= size
        head = text(name) + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
        return head + struct.pack("<BI", kind, count * item) + bytes(count * item)

    arrays = [
        array("decoder/embeddings/weight", (7, 4), 4, 2), array("encoder/conv1/weight", (4, 3, 3), 0, 4),
        array("encoder/position_encodings/encodings", (5, 4), 0, 4),
        array("decoder/position_encodings/encodings", (6, 4), 0, 4),
        array("encoder/layer_0/self_attention/linear_0/bias", (12,), 0, 4),
        array("encoder/layer_0/ffn/linear_0/weight", (8, 4), 0, 4),
        array("decoder/layer_0/ffn/linear_0/weight", (8, 4), 0, 4),
        array("decoder/scale_embeddings", (), 1, 1), array("encoder/num_heads", (), 2, 2),
        array("decoder/num_heads", (), 2, 2),
    ]  # fmt: skip
    good = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(arrays)) + b"".join(arrays)

    def run(data: bytes) -> None:
        (folder / MODEL_FILE).write_bytes(data)
        source = Ctranslate2Source(folder)
        source.shapes()
        for name in list(source.shapes())[:6]:
            source.read(name)
        source.config()
        source.write_vocabulary(out)

    return Ready(run, (SplitError, BundleError), (good, good[:200], good[:12]))
