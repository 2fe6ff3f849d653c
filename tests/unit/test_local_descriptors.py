"""`keystage up` and what it starts may open as many descriptors as the machine lets them."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, subprocess, sys
from keystage.wire.descriptors import raise_descriptors
soft, hard = (int(word) for word in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
said = raise_descriptors()
child = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
print(said, told.stdout.strip())
"""


@pytest.mark.parametrize(("soft", "hard"), [(64, 4096), (4096, 4096)])
def test_the_soft_limit_becomes_the_hard_one_and_children_have_it(soft: int, hard: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["4096", "4096", "4096"]
