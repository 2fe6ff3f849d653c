"""A replica with a real stage on a real device, which says what parameters the device has.

Run by fork servers, holders and standbys in the place of a worker. It writes one line of JSON: the
SHA-256 of the parameters as they lie on the device, and a few numbers computed with them; or why it has
none. Then it waits for its owner's end, as a worker does.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from keystage.bundle import store
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.keysmanager.segment_copy import Copy
from keystage.models.base import LoadedStage, Row, torch_dtype
from keystage.models.loading import load_stage, sample_input
from keystage.models.raw import tensors_in
from keystage.wire.cuda_driver import Driver
from keystage.worker.torch_executor import check_device

COPYING = "copying"
"""What a replica says that is to die while its parameters are copied, when the copy is queued."""


def main(supply: Any) -> int:
    """Loads, says what it has, and waits."""
    ended = os.eventfd(0)
    signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(ended, 1))
    dies = os.environ.get("TEST_DIES", "")
    if dies == "1":
        os._exit(7)
    if dies == "copy":
        _die_in_copy()
    if "KEYSTAGE_STAGES" not in os.environ:
        print("none", flush=True)
    else:
        try:
            print(json.dumps(_loaded(supply)), flush=True)
        except BundleError as error:  # as a worker: it ends, and says why
            print(json.dumps({"failed": str(error)}), flush=True)
            return 2
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)  # it got its parameters in a way that queues nothing
    supply.report("forward")
    supply.report("ready")
    select.select([int(os.environ["KEYSTAGE_LIFELINE_FD"]), ended], [], [])
    return 0


def _loaded(supply: Any) -> dict[str, Any]:
    """What `worker.torch_executor` does, and then what is there."""
    folder = store.bundle_path(os.environ["KEYSTAGE_BUNDLE"])
    pipeline = store.load(folder)
    index = int(os.environ["KEYSTAGE_STAGES"])
    device = check_device(os.environ["KEYSTAGE_DEVICE"])
    stage = supply.stage(pipeline, index, device, pipeline.dtype)
    if stage is None:
        stage = load_stage(folder, pipeline, index, device, torch_dtype(pipeline.dtype))
    if device != "cpu":
        supply.release()
    output = _computed(stage)
    return {"digest": digest_of(parameters_of(stage)), "device": str(stage.device), "output": output}


def _computed(stage: LoadedStage) -> list[float]:
    """Four numbers of a prompt's last token, and four of a decode step after it (a replay in a standby)."""
    stage.open(0, 32)
    prompt = stage.forward(sample_input(stage, 16), [Row(0, 0, 16)], [])
    step = stage.forward(sample_input(stage, 1), [Row(0, 16, 1)], [])
    stage.close(0)
    numbers: list[float] = torch.cat([prompt[-1, :4], step[-1, :4]]).float().tolist()
    return numbers


def parameters_of(stage: Any) -> Iterator[torch.Tensor]:
    """Parameters as the stage multiplies with them, layer by layer."""
    # A span has the parameters of each of its stages.
    parameters = stage.parameters[0] if isinstance(stage.parameters, list) else stage.parameters
    for layer in parameters.layers:
        yield layer.attention_norm
        yield _matrix(layer.qkv)
        yield _matrix(layer.out)
        yield layer.mlp_norm
        yield _matrix(layer.up)
        yield _matrix(layer.down)


def _matrix(multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    held = inspect.getclosurevars(multiply).nonlocals
    if "weight" in held:
        plain: torch.Tensor = held["weight"]
        return plain
    packed: torch.Tensor = held["blocks"].to_dense()
    return packed


def file_parameters(path: Path, pipeline: Pipeline, index: int) -> Iterator[torch.Tensor]:
    """The same from a stage's file, in the same order."""
    tensors = tensors_in(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), str(path))
    first, end = pipeline.stages[index].layers
    for layer in range(first, end):
        prefix = f"model.layers.{layer}."
        for part in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        ):  # fmt: skip
            yield tensors[f"{prefix}{part}.weight"]


def digest_of(parameters: Iterator[torch.Tensor]) -> str:
    """SHA-256 of their bytes, one after another."""
    whole = hashlib.sha256()
    with torch.inference_mode():
        for tensor in parameters:
            whole.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _die_in_copy() -> None:
    """The next piece that is queued for the device, from a segment or a ring, is the last thing done here."""
    for part, name in ((Copy, "_queue"), (Driver, "queue_chunk")):
        setattr(part, name, _last(getattr(part, name)))


def _last(queue: Callable[..., None]) -> Callable[..., None]:
    def queued(*arguments: Any) -> None:
        queue(*arguments)
        os.write(1, COPYING.encode() + b"\n")
        os.kill(os.getpid(), signal.SIGKILL)

    return queued
