"""`keystage split` on folders: what it writes, what it uses again, what it refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle import store
from keystage.bundle.errors import SplitError
from keystage.bundle.safetensors_file import parse_header
from keystage.bundle.split import split
from keystage.models.loading import load_stage, read_stage


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    return write_folder(tiny_model(num_hidden_layers=2), tmp_path / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uniform", "parameters", "time"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_parameter_is_in_exactly_one_stage(
    method: str, stages: int, model_folder: Path, tmp_path: Path
) -> None:
    folder = split(model_folder, stages, method, tmp_path / "bundle", "tiny")
    pipeline = store.load(folder)
    assert [stage.layers[0] for stage in pipeline.stages][1:] == [s.layers[1] for s in pipeline.stages][:-1]
    found: dict[str, torch.Tensor] = {}
    for stage in pipeline.stages:
        tensors = load_file(folder / stage.file)
        assert not set(tensors) & set(found)
        assert stage.parameters == sum(tensor.numel() for tensor in tensors.values())
        found.update(tensors)
        store.verify(folder, stage.index)
    expected = load_file(model_folder / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert pipeline.edges[-1] == (stages - 1, 0)
    assert (pipeline.tokenizer, pipeline.eos, pipeline.source) == ("", [2], "folder tiny")


def test_tied_matrices_lie_at_both_ends_once_each(tmp_path: Path) -> None:
    source = write_folder(tiny_model(tie_word_embeddings=True), tmp_path / "model")
    matrix = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    two = split(source, 2, "uniform", tmp_path / "two", "tiny")
    first, last = (load_file(two / f"stage-{i:02d}.safetensors") for i in range(2))
    assert torch.equal(first["model.embed_tokens.weight"], matrix)
    assert torch.equal(last["lm_head.weight"], matrix)
    assert "lm_head.weight" not in first
    assert "model.embed_tokens.weight" not in last
    one = split(source, 1, "uniform", tmp_path / "one", "tiny")
    assert "lm_head.weight" not in load_file(one / "stage-00.safetensors")


def test_shards_give_the_same_stages(model_folder: Path, tmp_path: Path) -> None:
    sharded = write_folder(tiny_model(), tmp_path / "tiny", shards=3)
    one = store.load(split(model_folder, 3, "uniform", tmp_path / "one", "tiny"))
    three = store.load(split(sharded, 3, "uniform", tmp_path / "three", "tiny"))
    assert one == three


def test_fused_parameters_are_views_of_the_file(model_folder: Path, tmp_path: Path) -> None:
    folder = split(model_folder, 2, "uniform", tmp_path / "bundle", "tiny")
    header = parse_header(folder / "stage-00.safetensors")
    assert header.data_start % 64 == 0
    tensors = read_stage(folder, store.load(folder), 0)
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    for left, right in itertools.pairwise(parts):
        assert left.data_ptr() + left.nbytes == right.data_ptr()


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtype_is_converted(dtype: str, kind: torch.dtype, model_folder: Path, tmp_path: Path) -> None:
    folder = split(model_folder, 2, "uniform", tmp_path / "bundle", "tiny", dtype)
    tensors = load_file(folder / "stage-00.safetensors")
    expected = load_file(model_folder / "model.safetensors")
    assert all(torch.equal(tensor, expected[name].to(kind)) for name, tensor in tensors.items())
    assert load_stage(folder, store.load(folder), 0, "cpu", "fp32").dtype is torch.float32


def test_a_bundle_is_used_again_until_something_changes(own_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"

    def made(stages: int = 2, dtype: str = "fp32", force: bool = False) -> int:
        return (
            (split(own_folder, stages, "uniform", out, "tiny", dtype, force) / "pipeline.json").stat().st_ino
        )

    first = made()
    assert made() == first
    assert made(force=True) != first
    again = made()
    assert made(stages=1) != again
    bf16 = made(dtype="bf16")
    (out / "stage-01.safetensors").unlink()
    assert made(dtype="bf16") != bf16
    parameters = load_file(own_folder / "model.safetensors")
    parameters["model.norm.weight"] += 1
    before = store.load(out).stages[1].identity
    save_file(parameters, own_folder / "model.safetensors")
    made(dtype="bf16")
    assert store.load(out).stages[1].identity != before
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_stack_yml_names_functions_labels_and_environment(model_folder: Path, tmp_path: Path) -> None:
    folder = split(model_folder, 2, "uniform", tmp_path / "a bundle", "tiny", "bf16")
    stack = yaml.safe_load((folder / "stack.yml").read_text())
    assert stack["version"] == 1.0
    assert stack["provider"] == {"name": "openfaas", "gateway": "http://127.0.0.1:8080"}
    assert list(stack["functions"]) == ["tiny", "tiny-stage-0", "tiny-stage-1"]
    stage = stack["functions"]["tiny-stage-1"]
    assert stage["skip_build"] is True
    assert stage["lang"] == "keystage-stage"
    assert stack["functions"]["tiny"]["lang"] == "keystage-router"
    assert stage["environment"] == {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": "tiny",
        "KEYSTAGE_STAGES": "1",
        "KEYSTAGE_BUNDLE": folder.as_uri(),
        "KEYSTAGE_DEVICE": "cpu",
        "KEYSTAGE_DTYPE": "bf16",
    }
    assert stage["labels"] == {
        "keystage.pipeline": "tiny",
        "keystage.stage": "1",
        "keystage.role": "stage",
        "com.openfaas.scale.factor": "0",
    }


def test_tokenizer_files_are_taken_along(own_folder: Path, tmp_path: Path) -> None:
    added = [{"id": 5, "content": "<s>"}, {"id": 6, "content": "</s>"}]
    (own_folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (own_folder / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": "old"}))
    (own_folder / "chat_template.jinja").write_text("new")
    (own_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    pipeline = store.load(split(own_folder, 1, "uniform", tmp_path / "bundle", "tiny"))
    assert (pipeline.tokenizer, pipeline.chat_template) == ("tokenizer.json", "new")
    assert (pipeline.bos, pipeline.eos) == (5, [2, 9, 6])
    assert pipeline.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def _config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _cut(folder: Path, at: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:at])


def _without(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def _with(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: tensor}, path)


def _missing_shard(folder: Path) -> None:
    write_folder(tiny_model(num_hidden_layers=2), folder, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: _cut(f, 5), "truncated"),
        (lambda f: _cut(f, 300), "truncated"),
        (lambda f: _cut(f, 9000), r"truncated: tensor .* lies at data bytes"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]"), "garbled"),
        (
            lambda f: _without(f, "model.layers.1.mlp.up_proj.weight"),
            "layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda f: _without(f, "lm_head.weight"), "lm_head.weight is missing"),
        (lambda f: _with(f, "model.layers.2.mlp.up_proj.weight", torch.ones(1)), "belongs to no stage"),
        (lambda f: _with(f, "model.norm.weight", torch.ones(47)), r"\[48\] expected .* \[47\] found"),
        (lambda f: _with(f, "model.norm.weight", torch.ones(48, dtype=torch.int8)), "type I8"),
        (_missing_shard, "shard model-00002-of-00003.safetensors.* is missing"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: garbled JSON"),
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (
            lambda f: _config(f, architectures=["BloomForCausalLM"]),
            "BloomForCausalLM is unknown: known are Llama",
        ),
        (lambda f: _config(f, architectures=None, model_type="bloom"), "model_type 'bloom' is unknown"),
        (lambda f: _config(f, hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
        (lambda f: _config(f, num_attention_heads=0), "num_attention_heads .* from 1 to 2147483647, got 0"),
        (lambda f: _config(f, num_key_value_heads=4), "6 heads are no multiple of 4"),
        (lambda f: _config(f, hidden_size="48"), "hidden_size .* got '48'"),
        (
            lambda f: _config(f, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
            "'longrope' is not",
        ),
        (lambda f: _config(f, quantization_config={"bits": 4}), "quantization_config"),
        (lambda f: _config(f, rms_norm_eps=-1), "rms_norm_eps must be a number above 0, got -1"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(
    damage: Callable[[Path], object], message: str, own_folder: Path, tmp_path: Path
) -> None:
    damage(own_folder)
    with pytest.raises(SplitError, match=message) as caught:
        split(own_folder, 2, "uniform", tmp_path / "bundle", "tiny")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"stages": -3}, "stages must be at least 1, got -3"),
        ({"stages": 6}, "6 stages wanted, but the model has 5 layers"),
        ({"method": "magic"}, "method 'magic' is unknown: use one of uniform, parameters, time"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown: use one of fp32, bf16, fp16"),
        ({"name": "Tiny Model"}, "name 'Tiny Model' must be"),
        ({"source": "/nowhere"}, "model '/nowhere': no such folder"),
    ],
)
def test_impossible_wishes_are_refused(
    changes: dict[str, object], message: str, model_folder: Path, tmp_path: Path
) -> None:
    wish = {
        "source": model_folder,
        "stages": 2,
        "method": "uniform",
        "out": tmp_path / "bundle",
        "name": "tiny",
        "dtype": "fp32",
    }
    with pytest.raises(SplitError, match=message):
        split(**{**wish, **changes})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_fp16_are_refused(own_folder: Path, tmp_path: Path) -> None:
    _with(own_folder, "model.norm.weight", torch.full((48,), 1e6))
    with pytest.raises(
        SplitError, match=r"model\.norm\.weight does not fit fp16: its largest value is 1e\+06"
    ):
        split(own_folder, 2, "uniform", tmp_path / "bundle", "tiny", "fp16")


def test_a_folder_with_something_else_is_left_alone(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(SplitError, match="holds something that is no bundle"):
        split(model_folder, 2, "uniform", tmp_path, "tiny", force=True)
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_a_failed_split_keeps_the_old_bundle(own_folder: Path, tmp_path: Path) -> None:
    out = split(own_folder, 2, "uniform", tmp_path / "bundle", "tiny")
    before = store.load(out)
    _cut(own_folder, 9000)
    with pytest.raises(SplitError):
        split(own_folder, 2, "uniform", out, "tiny", force=True)
    assert store.load(out) == before
    store.verify(out, 1)


def test_a_killed_split_is_swept(model_folder: Path, tmp_path: Path) -> None:
    dead = tmp_path / ".bundle.partial-4194305"
    dead.mkdir()
    (dead / "stage-00.safetensors").write_bytes(b"half")
    split(model_folder, 2, "uniform", tmp_path / "bundle", "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_stage_with_a_hole_or_a_wrong_hash_is_not_loaded(own_folder: Path, tmp_path: Path) -> None:
    from keystage.bundle.errors import BundleError

    out = split(own_folder, 2, "uniform", tmp_path / "bundle", "tiny")
    pipeline = store.load(out)
    body = bytearray((out / "stage-01.safetensors").read_bytes())
    body[-1] ^= 1
    (out / "stage-01.safetensors").write_bytes(body)
    with pytest.raises(BundleError, match=r"stage-01\.safetensors: chunk 0 altered"):
        load_stage(out, pipeline, 1)
    load_stage(out, pipeline, 1, check=False)
    unknown = msgspec.structs.replace(pipeline, family="gpt9")
    with pytest.raises(SplitError, match="family 'gpt9' is unknown"):
        load_stage(out, unknown, 0)


def test_a_tied_heads_copy_and_rotary_tables_are_left_out(tmp_path: Path) -> None:
    source = write_folder(tiny_model(tie_word_embeddings=True, num_hidden_layers=2), tmp_path / "m")
    plain = store.load(split(source, 2, "uniform", tmp_path / "plain", "tiny"))
    _with(source, "lm_head.weight", torch.zeros(97, 48))
    _with(source, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    assert store.load(split(source, 2, "uniform", tmp_path / "more", "tiny")).stages == plain.stages
