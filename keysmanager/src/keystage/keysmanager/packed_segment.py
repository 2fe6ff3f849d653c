"""A stage's packed form as a segment that processes which are no children of its holder can use.

    holder (`hold_stock`):  builds the stage, its matrices moved into one memfd; `publish` adds the rest
    daemon:                 hands the sealed memfd out like a raw one (`Segment.packed`)
    pod (`pod_supply`):     `PackedStage` maps it, and its stage multiplies with the shared pages at once

The file: the tensors that the stage made (packed ones as oneDNN has them in memory, beside its description of
their layout), the stage's own file with vectors alone (matrices are holes that take no memory), an index.
Packed matrices fit the very build of torch that made them: its version is the form's tag, and who asks names
his own. torch gives no other way to make a packed tensor of memory that is there than the C interface of its
compiler (`aoti_torch_*`); where that is missing nothing is published or taken, and raw bytes are used.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.bundle.safetensors_file import header_in
from keystage.keysmanager import segment
from keystage.keysmanager.pod_api import PackedForm
from keystage.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    import torch

    from keystage.models.base import AnyStage
    from keystage.models.shared import SharedMemory

_VERSION = 1
_DESCRIBE = "_get_mkldnn_serialized_md"
"""Operator that tells how a packed tensor lies in memory."""
_ALIGN_BYTES = 64


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: where, its sizes and type, and oneDNN's description of its layout (empty: a plain one)."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    layout: bytes


class _Index(msgspec.Struct, frozen=True):
    """What the file holds; `use` is what the stage was built as."""

    use: str
    raw_offset: int
    raw_nbytes: int
    parts: tuple[_Part, ...]


@functools.cache
def tag() -> str:
    """Names what can use packed forms that are made here; empty: nothing can. Imports no torch."""
    try:
        return f"{_VERSION}/torch-{importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def use_of(pipeline: Pipeline, index: int, dtype: str) -> str:
    """All that decides which tensors a stage makes of its file, in words."""
    stage = pipeline.stages[index]
    last = index == len(pipeline.stages) - 1
    return f"{pipeline.family} {stage.identity} layers {stage.layers} {index == 0} {last} {dtype}"


def publish(
    memory: SharedMemory, raw: memoryview, name: str, pipeline: Pipeline, index: int, dtype: str
) -> tuple[int, PackedForm] | None:
    """Completes a holder's memory, which is sealed afterwards by the caller.

    Args:
        memory: holds the large tensors of the stage.
        raw: the stage's file.
        name: of it, for messages.
        pipeline: its bundle's description.
        index: the stage.
        dtype: type it was built in.

    Returns:
        A descriptor for readers and what goes with it; None: this torch cannot make tensors of it again.

    Raises:
        SharedMemoryError: no memory.
    """
    import torch

    from keystage.models.shared import bytes_of

    if _interface() is None:
        return None
    end = memory.nbytes
    parts: list[_Part] = []
    for tensor, offset in memory.moved:
        body = bytes_of(tensor)
        if offset < 0:
            offset = _rounded(end, _ALIGN_BYTES)
            memory.write(body, offset)
            end = offset + len(body)
        layout = bytes(getattr(torch.ops.mkldnn, _DESCRIBE)(tensor).numpy()) if tensor.is_mkldnn else b""
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        parts.append(_Part(offset, len(body), tuple(tensor.shape), dtype_name, layout))
    start = _rounded(end, mmap.PAGESIZE)
    header = header_in(Path(name), raw)
    memory.write(raw[: header.data_start], start)
    for entry in header.tensors.values():
        if len(entry.shape) == 1:
            first, last = (header.data_start + offset for offset in entry.data_offsets)
            memory.write(raw[first:last], start + first)
    found = _Index(use_of(pipeline, index, dtype), start, len(raw), tuple(parts))
    body = memoryview(msgspec.msgpack.encode(found))
    place = start + len(raw)
    memory.write(body, place)
    return memory.reader(), PackedForm(tag=tag(), nbytes=place + len(body), index_bytes=len(body))


class PackedStage:
    """A packed form in this process's memory; implements `models.shared.Ready`.

    What is made of it stays mapped to the end of the process: packed tensors do not own their memory.

    Args:
        fd: the sealed memfd; stays open.
        form: what came beside it.

    Raises:
        SegmentError: not sealed, or not of that length.
        BundleError: garbled, or made by another torch.
    """

    def __init__(self, fd: int, form: PackedForm) -> None:
        if form.tag != tag():
            raise BundleError(f"packed form {form.tag}, this process uses {tag() or 'none'}")
        if _interface() is None:
            raise BundleError(f"packed form {form.tag}: this torch makes no tensor of packed memory")
        size = segment.check_sealed(fd)
        if size < form.nbytes:
            raise segment.SegmentError(f"packed segment of {size} bytes, {form.nbytes} were announced")
        self._view = segment.map_readonly(fd, form.nbytes)
        _kept.append(self._view)
        try:
            self._index = msgspec.msgpack.decode(
                self._view[form.nbytes - form.index_bytes : form.nbytes], type=_Index
            )
        except UNREADABLE as error:
            raise BundleError(f"index of a packed segment: {error}") from error
        self._left = list(reversed(self._index.parts))

    def __call__(self, tensor: torch.Tensor) -> None:
        """See `Ready`: nothing is made here that others would need."""

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """See `Ready.take`."""
        if not self._left or self._left[-1].shape != shape:
            have = list(self._left[-1].shape) if self._left else "nothing more"
            raise BundleError(f"packed segment: {list(shape)} expected, {have} found")
        return _tensor(self._view, self._left.pop())

    def build(self, pipeline: Pipeline, index: int, dtype: str) -> AnyStage:
        """The stage on the CPU.

        Raises:
            BundleError: it was packed for another use.
        """
        from keystage.models.loading import build_stage
        from keystage.models.raw import tensors_in

        wanted, start = use_of(pipeline, index, dtype), self._index.raw_offset
        if wanted != self._index.use:
            raise BundleError(f"packed segment is {self._index.use}, wanted is {wanted}")
        raw = segment.as_tensor(self._view[start : start + self._index.raw_nbytes])
        return build_stage(pipeline, index, tensors_in(raw, "packed segment"), "cpu", dtype, share=self)


_kept: list[memoryview] = []


def _tensor(view: memoryview, part: _Part) -> torch.Tensor:
    import torch

    flat = segment.as_tensor(view[part.offset : part.offset + part.nbytes])
    if not part.layout:
        return flat.view(getattr(torch, part.dtype)).view(part.shape)
    library = _interface()
    assert library is not None
    sizes = (ctypes.c_int64 * len(part.shape))(*part.shape)
    strides = (ctypes.c_int64 * len(part.shape))(*([1] * len(part.shape)))
    made = ctypes.c_void_p()
    kind = getattr(library, f"aoti_torch_dtype_{part.dtype}")()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(flat.data_ptr()), ctypes.c_int64(len(part.shape)), sizes, strides, ctypes.c_int64(0),
        kind, library.aoti_torch_device_type_cpu(), 0, ctypes.byref(made),
        library.aoti_torch_layout__mkldnn(), part.layout, ctypes.c_int64(len(part.layout)),
    )  # fmt: skip
    if failed:
        raise BundleError(f"torch makes no tensor of a packed matrix of shape {list(part.shape)}")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(made, None, None))  # noqa: SLF001
    return tensor


@functools.cache
def _interface() -> ctypes.CDLL | None:
    """Torch's C interface; None: this torch lacks a part of what is needed."""
    import torch

    needed = (
        "aoti_torch_create_tensor_from_blob_v2",
        "aoti_torch_device_type_cpu",
        "aoti_torch_dtype_bfloat16",
        "aoti_torch_dtype_float32",
        "aoti_torch_layout__mkldnn",
    )
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    makes = hasattr(getattr(torch._C, "_aoti", None), "alloc_tensor_by_stealing_from_void_ptr")  # noqa: SLF001
    describes = hasattr(torch.ops.mkldnn, _DESCRIBE)
    return library if makes and describes and all(hasattr(library, name) for name in needed) else None


def _rounded(offset: int, step: int) -> int:
    return -(-offset // step) * step


def closed(published: tuple[int, PackedForm] | None) -> None:
    """Closes the descriptor of a published form."""
    if published is not None:
        os.close(published[0])
