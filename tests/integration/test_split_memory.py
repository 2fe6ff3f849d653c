"""Memory while splitting a folder stays below twice the largest stage plus the largest tensor.

Random parameters are never held whole either: one tensor as it is made, and as it is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_llama import BASE

MEASURE = """
import pathlib, re, sys
import torch
from keystage.bundle.split import split
import keystage.models.layer_time
import keystage.bundle.source_folder, keystage.bundle.source_gguf, keystage.bundle.source_random
import keystage.models.families

def peak_bytes():
    # Not getrusage: its maximum is carried over from the parent process.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

torch.ones(8).to(torch.bfloat16).sum().item()
before = peak_bytes()
split(sys.argv[1], 6, sys.argv[3], sys.argv[2], "wide", sys.argv[4])
print(peak_bytes() - before)
"""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 layers of 25 MB in bf16, in one file: the whole is far larger than the bound."""
    from keystage.models.base import StageRole
    from keystage.models.families import family_of

    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    config = {**BASE, **sizes, **heads, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = family_of(config).stage_tensors(config, StageRole(0, 12, True, True))
    values = {tensor.name: torch.full(tensor.shape, 0.5, dtype=torch.bfloat16) for tensor in tensors}
    save_file(values, folder / "model.safetensors")
    return folder


def _used_bytes(model: str, out: Path, method: str, dtype: str) -> int:
    command = [sys.executable, "-c", MEASURE, model, str(out), method, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uniform", "time"])
def test_peak_memory_is_bounded(method: str, wide_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    used = _used_bytes(str(wide_model), out, method, "fp32")
    largest_stage = max(path.stat().st_size for path in out.glob("stage-*.safetensors"))
    largest_tensor = 1024 * 2816 * 4
    whole = (wide_model / "model.safetensors").stat().st_size * 2
    bound = 2 * largest_stage + largest_tensor
    assert bound < 0.6 * whole
    assert largest_tensor < used < bound, f"{used} bytes used, {bound} allowed"


@pytest.mark.slow
def test_random_parameters_are_made_one_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    used = _used_bytes("random:opt-125m", out, "parameters", "bf16")
    largest_tensor = 50272 * 768 * 4
    block = 8 * 1024 * 1024 * 4
    whole = sum(path.stat().st_size for path in out.glob("stage-*.safetensors")) * 2
    bound = 2 * largest_tensor + block + 32 * 1024 * 1024
    assert bound < 0.6 * whole
    assert largest_tensor < used < bound, f"{used} bytes used, {bound} allowed"
