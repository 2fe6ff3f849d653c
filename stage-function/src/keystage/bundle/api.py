"""The bundle: `pipeline.json` beside one `stage-NN.safetensors` per stage.

Written by `keystage split`, read by router (shapes, tokenizer), worker (parameters) and
controller (graph, profile). This module holds types and constants only and imports no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from keystage.streams.graph import Graph, ProgramReference

BUNDLE_VERSION = 1
CHUNK_BYTES = 16 * 1024 * 1024
"""Hash unit: one digest over 5 GiB takes 5.4 s on a core and cannot verify ranges."""

CPU_PROFILE_VERSION = 1
CPU_PROFILE = "cpu-profile.json"

Execution = Literal["looping", "single-pass", "program"]


class StageProfile(msgspec.Struct, frozen=True):
    """Service time l(b) = alpha_s * b + beta_s in seconds for b rows.

    Attributes:
        device: device type it was measured on.
        alpha_s: seconds per row.
        beta_s: seconds per batch.
        prefill_token_s: seconds per prompt token (looping only).
        alpha_error_s: half the width of alpha's 95 % interval; 0 where no interval was made.
        beta_error_s: the same of beta.
        prefill_error_s: the same of the seconds per prompt token.
        prefill_beta_s: seconds per prefill chunk, whatever its length (looping only).
        kv_token_s: seconds that each position of KV state adds to a decode row (looping only).
        kv_error_s: half the width of its 95 % interval.
        tokens: positions of KV state that decode attended to; 0: not told.
        cores: CPU threads it was measured with; 0: not told, or not on a CPU.
    """

    device: str
    alpha_s: float
    beta_s: float
    prefill_token_s: float = 0.0
    alpha_error_s: float = 0.0
    beta_error_s: float = 0.0
    prefill_error_s: float = 0.0
    prefill_beta_s: float = 0.0
    kv_token_s: float = 0.0
    kv_error_s: float = 0.0
    tokens: int = 0
    cores: int = 0


class StageSpec(msgspec.Struct, frozen=True):
    """One stage.

    Attributes:
        index: position, from 0.
        file: safetensors file within the bundle, empty for an emulated stage.
        layers: first and one-past-last layer index.
        parameters: number of parameters.
        nbytes: size of the file in bytes.
        chunks: SHA-256 (hex) of each 16 MiB chunk of the file.
        identity: SHA-256 (hex) of the chunk list and dtype: the identity of the parameters.
        activation_bytes: bytes of output per row (one token, or one item).
        profile: service time where it was measured.
    """

    index: int
    file: str
    layers: tuple[int, int]
    parameters: int
    nbytes: int
    chunks: list[str]
    identity: str
    activation_bytes: int
    profile: StageProfile | None = None


class CpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a stage on CPU cores.

    Attributes:
        latency_s: seconds of a batch.
        cores: CPU cores (threads) it had.
        batch: items in the batch.
        activation_bytes: bytes of one item's activation.
        queue: items waiting meanwhile.
        parameters: parameters of the stage.
        communication_s: seconds of it spent on receiving and sending.
    """

    latency_s: float
    cores: float
    batch: float = 1.0
    activation_bytes: float = 0.0
    queue: float = 0.0
    parameters: float = 0.0
    communication_s: float = 0.0


class CpuProfile(msgspec.Struct, frozen=True):
    """Content of `cpu-profile.json` beside `pipeline.json`: what CPU cores are worth to each stage.

    Attributes:
        version: format version.
        stages: rows per stage, in the stages' order; none: nothing was measured.
    """

    version: int
    stages: list[list[CpuRow]]


class Pipeline(msgspec.Struct, frozen=True):
    """Content of `pipeline.json`.

    Attributes:
        version: bundle format version.
        name: pipeline (and router function) name.
        family: model family (`llama`), or `emulated`.
        execution: `looping`, `single-pass`, or `program` (a stream program, a module a stage).
        dtype: element type of parameters and activations (`float32`, `bfloat16`, `float16`).
        config: the family's configuration, as in the model's config.json.
        stages: the stages in order.
        edges: the graph as (from, to) stage pairs; the loop edge (last, 0) for looping ones.
        context_length: largest number of token positions; 0 where inputs are not tokens.
        vocab_size: number of token ids; 0 where there are none.
        hidden_size: width of the activation.
        eos: token ids that end a session.
        bos: token id put before a prompt, or None.
        tokenizer: tokenizer file in the bundle (`tokenizer.json`), empty: raw bytes are ids.
        chat_template: Jinja source of the chat template, empty when the model has none.
        special_tokens: names to token texts, for the chat template (`bos_token`, ...).
        source: where the parameters came from, in words.
        graph: modules and streams of a stream program, None for other pipelines.
        program: where its code is; a bundle holds none.
    """

    version: int
    name: str
    family: str
    execution: Execution
    dtype: str
    config: dict[str, Any]
    stages: list[StageSpec]
    edges: list[tuple[int, int]]
    context_length: int
    vocab_size: int
    hidden_size: int
    eos: list[int]
    bos: int | None = None
    tokenizer: str = ""
    chat_template: str = ""
    special_tokens: dict[str, str] = {}
    source: str = ""
    graph: Graph | None = None
    program: ProgramReference | None = None


def emulated(
    name: str,
    stages: int,
    *,
    execution: Execution,
    activation_bytes: int = 4096,
    context_length: int = 4096,
) -> Pipeline:
    """Describes a pipeline without parameters, for emulated devices (`--device emulated:...`).

    Args:
        name: pipeline name.
        stages: number of stages.
        execution: looping (token = hash(session, position)) or single-pass (output = input bytes).
        activation_bytes: bytes moved from stage to stage per row.
        context_length: token positions per session.
    """
    specs = [
        StageSpec(i, "", (i, i + 1), 0, 0, [], f"emulated-{name}-{i}", activation_bytes)
        for i in range(stages)
    ]
    edges = [(i, i + 1) for i in range(stages - 1)]
    if execution == "looping":
        edges.append((stages - 1, 0))
    return Pipeline(
        version=BUNDLE_VERSION,
        name=name,
        family="emulated",
        execution=execution,
        dtype="uint8",
        config={},
        stages=specs,
        edges=edges,
        context_length=context_length if execution == "looping" else 0,
        vocab_size=256,
        hidden_size=activation_bytes,
        eos=[],
        source="emulated",
    )
