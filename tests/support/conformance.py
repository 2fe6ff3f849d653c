"""Runs schemathesis against a served OpenAPI document, with a fixed seed and a bound."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

SEED = 20260201
MOST_EXAMPLES = 5
"""Per operation and phase; the coverage phase adds its own, which depend on the document alone."""
RUN_S = 120.0
HOOKS = Path(__file__).parent / "openapi_hooks.py"


async def conform(folder: Path, name: str, config: str, url: str, **env: str) -> str:
    """Runs schemathesis against a document; gives what it said.

    Raises:
        AssertionError: something does not conform.
    """
    file = folder / f"{name}.toml"
    file.write_text(config)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("--config-file", str(file), "run", url, "--seed", str(SEED), "--no-color", "--continue-on-failure"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(MOST_EXAMPLES)),
        *("--suppress-health-check", "all", "--generation-database", "none"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), **env},
    )
    try:
        said, _ = await asyncio.wait_for(program.communicate(), RUN_S)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    assert program.returncode == 0, said.decode()
    return said.decode()
