"""What the main job sends to a pipeline, and how `keystage run` takes its model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from keystage.bundle.api import Execution, Pipeline, emulated
from keystage.bundle.errors import SplitError
from keystage.cli.main import app
from keystage.local.traffic import Traffic, traffic_of

BASE = emulated("p", 2, execution="looping")


def _pipeline(family: str, execution: Execution, **fields: Any) -> Pipeline:
    return msgspec.structs.replace(BASE, family=family, execution=execution, **fields)


@pytest.mark.parametrize(
    ("pipeline", "traffic"),
    [
        (
            _pipeline("llama", "looping", tokenizer="tokenizer.json"),
            Traffic("openai", 4096, byte_tokens=False),
        ),
        (_pipeline("opt", "looping", context_length=512), Traffic("openai", 512, byte_tokens=True)),
        (
            _pipeline("whisper", "looping", context_length=1948, tokenizer="tokenizer.json"),
            Traffic("transcriptions", 1948, byte_tokens=False),
        ),
        (
            _pipeline("bert", "single-pass", context_length=256, tokenizer="tokenizer.json"),
            Traffic("embeddings", 252, byte_tokens=False),
        ),
        (
            _pipeline(
                "bert",
                "single-pass",
                config={"architectures": ["BertForMaskedLM"]},
                context_length=512,
                tokenizer="tokenizer.json",
                special_tokens={"mask_token": "[MASK]"},
            ),
            Traffic("masks", 508, byte_tokens=False, mask="[MASK]"),
        ),
        (
            _pipeline("wide_resnet", "single-pass", context_length=0, vocab_size=0),
            Traffic("images", 2048, byte_tokens=False),
        ),
        (emulated("e", 2, execution="looping"), Traffic("openai", 4096, byte_tokens=True)),
        (emulated("e", 2, execution="single-pass"), Traffic("raw", 2048, byte_tokens=True)),
    ],
)
def test_traffic_fits_the_pipeline(pipeline: Pipeline, traffic: Traffic) -> None:
    assert traffic_of(pipeline) == traffic
    options = traffic.options()
    assert options[:4] == ["--target", traffic.kind, "--context", str(traffic.context_tokens)]
    assert ("--byte-tokens" in options) is traffic.byte_tokens
    assert options[-2:] == ["--mask", traffic.mask] if traffic.mask else "--mask" not in options


def test_what_nothing_can_be_sent_to_is_refused() -> None:
    masks = {"architectures": ["BertForMaskedLM"]}
    with pytest.raises(SplitError, match="fills masks and has no tokenizer with one"):
        traffic_of(_pipeline("bert", "single-pass", config=masks))
    with pytest.raises(
        SplitError, match=r"device 'emulated:alpha=1' computes nothing, and wide_resnet answers"
    ):
        traffic_of(_pipeline("wide_resnet", "single-pass"), "emulated:alpha=1")
    assert traffic_of(_pipeline("llama", "looping"), "emulated:alpha=1").kind == "openai"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "mystery"],
            "model 'mystery': no such folder or .gguf file, and no known name: smollm2, minilm",
        ),
        (["run", "--model", "random:huge"], "model 'random:huge': unknown shape, known are llama-tiny"),
        (["run", "smollm2", "--model", "minilm"], "two models are given, 'smollm2' and --model 'minilm'"),
        (["run", "random:llama-tiny", "--stages", "9"], "9 stages wanted, but the model has 4 layers"),
        (
            ["run", "random:llama-tiny", "--dtype", "int4"],
            "dtype 'int4' is unknown: use one of fp32, bf16, fp16",
        ),
        (
            ["demo", "http://127.0.0.1:1", "p", "--target", "video"],
            "--target must be one of openai, function, raw",
        ),
    ],
)
def test_bad_wishes_are_one_line(
    arguments: list[str], message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYSTAGE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1
