"""A stage's packed form used by a process that did not pack it: the same bits, the same pages."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.keysmanager_forks import open_fds, status_bytes
from support.tiny_decoders import decoder
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle import store
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.bundle.split import split
from keystage.keysmanager import packed_segment, segment
from keystage.keysmanager.packed_segment import PackedStage
from keystage.keysmanager.pod_api import PackedForm
from keystage.models.base import Row
from keystage.models.linear import is_packable
from keystage.models.loading import build_stage
from keystage.models.raw import tensors_in
from keystage.models.shared import SharedMemory

STAGES = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "small": {"hidden_size": 48, "intermediate_size": 80},
}
pytestmark = pytest.mark.skipif(
    not is_packable(torch.device("cpu"), torch.float32) or packed_segment._interface() is None,
    reason="this torch packs nothing, or makes no tensor of packed memory",
)


def bundle_of(folder: Path, **changes: Any) -> Path:
    sizes = {"hidden_size": 384, "intermediate_size": 512, "vocab_size": 512, **changes}
    return split(write_folder(tiny_model(**sizes), folder / "m"), STAGES, "parameters", folder / "b", "t")


def family_bundle_of(folder: Path, variant: str) -> Path:
    return split(write_folder(decoder(variant), folder / "m"), STAGES, "parameters", folder / "b", "t")


def logits(model: Any, is_first: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ids = torch.tensor([5, 6, 7])
    x = ids if is_first else torch.randn(3, model.shape.hidden_size, generator=generator).to(model.dtype)
    model.open(1, 8)
    found: torch.Tensor = model.forward(x, [Row(1, 0, 3)], [0])
    model.close(1)
    return found


def published(folder: Path, index: int, dtype: str) -> tuple[Pipeline, torch.Tensor, int, PackedForm]:
    """As a holder does: the description, what the stage computes, and its packed form."""
    pipeline = store.load(folder)
    raw = memoryview((folder / pipeline.stages[index].file).read_bytes())
    memory = SharedMemory("keystage-packed-test")
    tensors = tensors_in(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "raw")
    model = build_stage(pipeline, index, tensors, "cpu", dtype, share=memory.move)
    found = packed_segment.publish(memory, raw, "raw", pipeline, index, dtype)
    memory.seal()
    assert found is not None, "nothing was published"
    return pipeline, logits(model, index == 0), *found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_stage_computes_the_same_bits_from_the_packed_form(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    if not is_packable(torch.device("cpu"), getattr(torch, dtype)):
        pytest.skip(f"{dtype} is not packed on this machine")
    folder = bundle_of(tmp_path, **VARIANTS[variant])
    for index in range(STAGES):
        pipeline, expected, fd, form = published(folder, index, dtype)
        model = PackedStage(fd, form).build(pipeline, index, dtype)
        os.close(fd)
        assert torch.equal(logits(model, index == 0), expected)


@pytest.mark.parametrize("variant", ["opt", "opt-untied", "gpt2", "qwen2-tied", "qwen3"])
def test_every_family_computes_the_same_bits_from_the_packed_form(tmp_path: Path, variant: str) -> None:
    folder = family_bundle_of(tmp_path, variant)
    for index in range(STAGES):
        pipeline, expected, fd, form = published(folder, index, "float32")
        model = PackedStage(fd, form).build(pipeline, index, "float32")
        os.close(fd)
        assert torch.equal(logits(model, index == 0), expected)


@pytest.mark.slow
def test_nothing_is_copied_and_holes_take_no_memory(tmp_path: Path) -> None:
    folder = bundle_of(tmp_path, hidden_size=960, intermediate_size=2048)
    fds = open_fds()
    pipeline, _, fd, form = published(folder, 1, "float32")
    nbytes = pipeline.stages[1].nbytes
    assert nbytes > 20_000_000
    assert form.nbytes > 2 * nbytes  # the tensors, and the file with holes
    assert os.fstat(fd).st_blocks * 512 < 1.1 * nbytes
    before = status_bytes(os.getpid(), "RssAnon")
    model = PackedStage(fd, form).build(pipeline, 1, "float32")
    assert status_bytes(os.getpid(), "RssAnon") - before < nbytes / 10
    logits(model, is_first=False)
    assert os.fstat(fd).st_blocks * 512 < 1.1 * nbytes
    os.close(fd)
    assert open_fds() == fds


def test_the_form_is_sealed_and_its_descriptor_reads_only(tmp_path: Path) -> None:
    _, _, fd, form = published(bundle_of(tmp_path), 0, "float32")
    assert segment.check_sealed(fd) >= form.nbytes
    for work in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK),
        lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0),
    ):
        with pytest.raises(OSError, match=r"not permitted|Bad file|Invalid argument"):
            work()


def test_a_form_for_another_torch_use_or_of_garbage_is_refused(tmp_path: Path) -> None:
    pipeline, _, fd, form = published(bundle_of(tmp_path), 1, "float32")
    with pytest.raises(BundleError, match="packed form other, this process uses 1/torch-"):
        PackedStage(fd, msgspec.structs.replace(form, tag="other"))
    with pytest.raises(BundleError, match="wanted is llama"):
        PackedStage(fd, form).build(pipeline, 2, "float32")
    with pytest.raises(BundleError, match="wanted is llama"):
        PackedStage(fd, form).build(pipeline, 1, "bfloat16")
    with pytest.raises(BundleError, match="index of a packed segment"):
        PackedStage(fd, msgspec.structs.replace(form, index_bytes=form.index_bytes - 7))
    with pytest.raises(segment.SegmentError, match="were announced"):
        PackedStage(fd, msgspec.structs.replace(form, nbytes=form.nbytes + (1 << 20)))
    taken = PackedStage(fd, form)
    with pytest.raises(BundleError, match=r"\[3, 3\] expected"):
        taken.take((3, 3))
    open_fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    with pytest.raises(segment.SegmentError, match="not sealed"):
        PackedStage(open_fd, form)
    os.close(open_fd)
    os.close(fd)


@pytest.mark.parametrize("lacks", ["the C interface", "the layout"])
def test_a_torch_that_lacks_the_interface_neither_gives_nor_takes_a_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    folder = bundle_of(tmp_path)
    _, _, fd, form = published(folder, 1, "float32")
    if lacks == "the layout":
        monkeypatch.setattr(packed_segment, "_DESCRIBE", "_no_such_operator")
    else:
        monkeypatch.delattr("torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr")
    packed_segment._interface.cache_clear()
    try:
        with pytest.raises(BundleError, match="this torch makes no tensor of packed memory"):
            PackedStage(fd, form)
        with pytest.raises(AssertionError, match="nothing was published"):
            published(folder, 1, "float32")
    finally:
        packed_segment._interface.cache_clear()
        os.close(fd)
