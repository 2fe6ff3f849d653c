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
GATEWAY = """
[auth.openapi.basic]
username = "${KEYSTAGE_TEST_USER}"
password = "${KEYSTAGE_TEST_PASSWORD}"
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502", "503", "504"]
[[operations]]
include-path-regex = "^/system/|^/async-function/"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]
[[operations]]
include-path-regex = "^/function/"
checks.positive_data_acceptance.enabled = false
checks.negative_data_rejection.enabled = false
checks.unsupported_method.enabled = false
checks.allow_header_conformance.enabled = false
"""
"""Functions behind it answer as they like, and may be away."""
HOOKS = Path(__file__).parent / "openapi_hooks.py"


async def conform(folder: Path, name: str, config: str, url: str, **env: str) -> str:
    """Runs schemathesis against a document, with few examples; gives what it said.

    Raises:
        AssertionError: something does not conform.
    """
    code, said = await generated(folder, name, config, url, "--max-examples", str(MOST_EXAMPLES), **env)
    assert code == 0, said
    return said


async def generated(
    folder: Path,
    name: str,
    config: str,
    url: str,
    *arguments: str,
    seed: int = SEED,
    run_s: float = RUN_S,
    **env: str,
) -> tuple[int, str]:
    """Runs schemathesis against a document.

    Args:
        folder: where its configuration is written.
        name: of the run.
        config: its configuration, TOML.
        url: of the document, or a file.
        arguments: more of its command line.
        seed: of what is generated.
        run_s: it is ended after so long.
        env: more variables.

    Returns:
        Its exit code, and what it said.

    Raises:
        TimeoutError: it did not end.
    """
    file = folder / f"{name}.toml"
    file.write_text(config)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("--config-file", str(file), "run", url, "--seed", str(seed), "--no-color", "--continue-on-failure"),
        *("--phases", "examples,coverage,fuzzing", *arguments),
        *("--suppress-health-check", "all", "--generation-database", "none"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), **env},
    )
    try:
        said, _ = await asyncio.wait_for(program.communicate(), run_s)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    return program.returncode or 0, said.decode(errors="replace")
