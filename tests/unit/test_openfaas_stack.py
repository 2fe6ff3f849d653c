"""Stack files as faas-cli would deploy them."""

from __future__ import annotations

from pathlib import Path

import pytest

from keystage.bundle.api import emulated
from keystage.bundle.stack_yml import stack_yml
from keystage.openfaas.stack import MAX_STACK_BYTES, StackError, deployments, read_stack

STACK = """\
version: 1.0
provider:
  name: openfaas
  gateway: http://gw:8080
functions:
  f:
    lang: python3-http
    handler: ./f
    image: ghcr.io/example/f:1   # a comment with ${NOT:-read}
    fprocess: python index.py
    environment: {FLAG: yes, NUMBER: 010, EMPTY: ""}
    environment_file: [more.yml]
    secrets: [token]
    constraints: ["a=b"]
    labels: {com.openfaas.scale.max: 8}
    annotations:
    limits: {memory: 1Gi, nvidia.com/gpu: 1}
    readonly_root_filesystem: true
  g: {image: g}
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "stack.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_functions_are_read_as_texts_with_their_files(tmp_path: Path) -> None:
    (tmp_path / "more.yml").write_text("environment:\n  NUMBER: 7\n  MORE: x\n")
    stack = read_stack(written(tmp_path, STACK))
    assert stack.provider.gateway == "http://gw:8080"
    f, g = deployments(stack, tmp_path)
    assert (f.service, f.image, f.envProcess) == ("f", "ghcr.io/example/f:1", "python index.py")
    assert f.envVars == {"FLAG": "yes", "NUMBER": "7", "EMPTY": "", "MORE": "x"}
    assert (f.secrets, f.constraints, f.annotations) == (["token"], ["a=b"], {})
    assert f.labels == {"com.openfaas.scale.max": "8"}
    assert f.limits == {"memory": "1Gi", "nvidia.com/gpu": "1"}
    assert f.readOnlyRootFilesystem
    assert (g.service, g.limits, g.readOnlyRootFilesystem) == ("g", None, False)


def test_our_own_stack_files_are_read(tmp_path: Path) -> None:
    pipeline = emulated("p", 3, execution="single-pass")
    stack = read_stack(written(tmp_path, stack_yml(pipeline, tmp_path)))
    found = deployments(stack, tmp_path)
    assert [d.service for d in found] == ["p", "p-stage-0", "p-stage-1", "p-stage-2"]
    assert [d.envVars["KEYSTAGE_ROLE"] for d in found] == ["router", "stage", "stage", "stage"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "functions:\n  f:\n    image: ${REG:-x}/f\n",
            r"line 3: \$\{REG:-x\} is replaced by faas-cli",
        ),
        ("functions: [", "is no YAML"),
        ("\x00", "is no YAML"),
        (b"\xff\xfe\xfa", "is no YAML"),
        ("just text", "is no stack file: Expected `object`, got `str`"),
        ("functions: {f: [1]}", "is no stack file"),
        ("functions: {f: {labels: [a]}}", r"is no stack file: Expected `object`.*labels"),
        ("functions: &a {f: *a}", "is no YAML: found unconstructable recursive node"),
        ("provider: {name: openfaas}", "has no functions"),
        ("", "has no functions"),
        ("x" * (MAX_STACK_BYTES + 1), f"has more than {MAX_STACK_BYTES} bytes"),
    ],
)
def test_what_is_no_stack_file_is_named(tmp_path: Path, text: str | bytes, reason: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(StackError, match=reason) as caught:
        read_stack(path)
    assert str(path) in str(caught.value)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"none\.yml cannot be read: No such file"):
        read_stack(tmp_path / "none.yml")
    stack = read_stack(written(tmp_path, STACK))
    with pytest.raises(StackError, match=r"more\.yml cannot be read"):
        deployments(stack, tmp_path)
