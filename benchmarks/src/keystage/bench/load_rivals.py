"""What else brings a file's parameters to a GPU, one way a process: beside ours in `keystage bench load`.

    python -m keystage.bench.load_rivals WAY FILE DEVICE

Prints seconds of every repetition and the bytes as JSON; exit 3 where the library is not there. The file
is in the page cache, the context is warm, and a repetition ends when the device has all tensors. The
limit is a copy from memory that was pinned long before: no loader can be faster.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ABSENT = 3
LIMIT = "pinned-copy"
REPEATS = {LIMIT: 7}
FEW_REPEATS = 3
"""Of the rivals: they stand beside, no figure hangs on them, and the slowest takes seconds each."""
WAY_S = 150.0
_PINNED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rival:
    """What a way reached.

    Attributes:
        way: its name.
        seconds: per repetition, none where it is absent.
        nbytes: bytes of a repetition.
        note: why it is absent.
    """

    way: str
    seconds: tuple[float, ...]
    nbytes: int
    note: str = ""

    @property
    def gbps(self) -> list[float]:
        """GB/s of each repetition."""
        return [self.nbytes / seconds / 1e9 for seconds in self.seconds]


def measure(way: str, path: Path, device: str) -> Rival:
    """Runs one way in a process of its own; never raises because a rival fails."""
    command = [sys.executable, "-m", "keystage.bench.load_rivals", way, str(path), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAY_S, check=False)
    except subprocess.TimeoutExpired:
        return Rival(way, (), 0, f"no end within {WAY_S:.0f} s")
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return Rival(way, (), 0, lines[-1][:200] if lines else f"exit code {done.returncode}")
    seconds, nbytes = json.loads(done.stdout.strip().splitlines()[-1])
    return Rival(way, tuple(seconds), nbytes)


def _pinned_copy(path: Path, device: str) -> int:
    import torch

    if not _pinned:
        _pinned.append(torch.zeros(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True))
        _pinned.append(torch.zeros(_PINNED_BYTES, dtype=torch.uint8, device=device))
    source, target = _pinned
    size = path.stat().st_size
    done = 0
    while done < size:
        part = min(_PINNED_BYTES, size - done)
        target[:part].copy_(source[:part], non_blocking=True)
        done += part
    torch.cuda.synchronize()
    return size


_pinned: list[torch.Tensor] = []


def _safetensors(path: Path, device: str) -> int:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path, device=device)
    torch.cuda.synchronize()
    return sum(tensor.nbytes for tensor in tensors.values())


def _fastsafetensors(path: Path, device: str) -> int:
    import torch

    library = importlib.import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), torch.device(device), nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    nbytes = sum(buffers.get_tensor(name).nbytes for name in loader.get_keys())
    torch.cuda.synchronize()
    buffers.close()
    loader.close()
    return int(nbytes)


def _runai_model_streamer(path: Path, device: str) -> int:
    import torch

    library = importlib.import_module("runai_model_streamer")
    nbytes = 0
    with library.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        kept = []
        for _, tensor in streamer.get_tensors():
            kept.append(tensor.to(device))
            nbytes += tensor.nbytes
    torch.cuda.synchronize()
    return nbytes


def _sllm_store(path: Path, device: str) -> int:
    library = importlib.import_module("sllm_store.torch")
    tensors = library.load_dict(str(path), {"": device})
    return sum(tensor.nbytes for tensor in tensors.values())


WAYS: dict[str, Callable[[Path, str], int]] = {
    LIMIT: _pinned_copy,
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "runai_model_streamer": _runai_model_streamer,
    "sllm_store": _sllm_store,
}


def main(arguments: list[str]) -> int:
    """Runs one way, once without counting it."""
    way, path, device = arguments[1], Path(arguments[2]), arguments[3]
    import torch

    torch.zeros(1, device=device)
    torch.cuda.synchronize()
    seconds = []
    nbytes = 0
    for _ in range(1 + REPEATS.get(way, FEW_REPEATS)):
        begin_s = time.perf_counter()
        try:
            nbytes = WAYS[way](path, device)
        except ImportError as error:
            print(f"not installed: {error}")
            return ABSENT
        seconds.append(time.perf_counter() - begin_s)
        torch.cuda.empty_cache()
    print(json.dumps([seconds[1:], nbytes]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
