"""Functions of a `stack.yml`, as faas-cli would deploy them.

Used by `keystage check-gateway`. It reads what reaches the gateway and leaves the rest (lang, handler, build
options) alone. Values are texts, as faas-cli takes them: `1` is "1" and `yes` is "yes". faas-cli replaces
`${NAME:-value}` before it reads the file; here that is not done, and refused by line where it is met.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from keystage.local.api import Deployment

if TYPE_CHECKING:
    from types import ModuleType

MAX_STACK_BYTES = 1 << 20
MAX_VALUES = 1 << 18
"""With every alias written out: a few lines of aliases of aliases stand for more than any memory holds."""
_SUBSTITUTION = re.compile(r"\$\{[^}]*\}")
T = TypeVar("T")


class StackError(Exception):
    """A stack file that cannot be used; names file, place and reason."""


class StackFunction(msgspec.Struct, frozen=True):
    """What of a function in a stack file reaches the gateway."""

    image: str = ""
    fprocess: str = ""
    namespace: str = ""
    environment: dict[str, str] = {}
    environment_file: list[str] = []
    secrets: list[str] = []
    constraints: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    readonly_root_filesystem: str = ""


class Provider(msgspec.Struct, frozen=True):
    """Where the stack is deployed."""

    name: str = ""
    gateway: str = ""


class Stack(msgspec.Struct, frozen=True):
    """A stack file."""

    functions: dict[str, StackFunction] = {}
    provider: Provider = Provider()


class EnvironmentFile(msgspec.Struct, frozen=True):
    """A file named in `environment_file`."""

    environment: dict[str, str] = {}


def read_stack(path: Path) -> Stack:
    """Reads a stack file.

    Raises:
        StackError: it cannot be read, or is none.
    """
    stack = _read(path, Stack)
    if not stack.functions:
        raise StackError(f"{path} has no functions")
    return stack


def deployments(stack: Stack, folder: Path) -> list[Deployment]:
    """What faas-cli would send to the gateway, in the file's order.

    Args:
        stack: the file's content.
        folder: the file's folder, from which `environment_file`s are read; their values win.

    Raises:
        StackError: an `environment_file` cannot be used.
    """
    return [
        Deployment(
            service=name,
            image=function.image,
            namespace=function.namespace,
            envProcess=function.fprocess,
            envVars=function.environment | _environment(function, folder),
            constraints=function.constraints,
            secrets=function.secrets,
            labels=function.labels,
            annotations=function.annotations,
            limits=function.limits or None,
            requests=function.requests or None,
            readOnlyRootFilesystem=function.readonly_root_filesystem.lower() == "true",
        )
        for name, function in stack.functions.items()
    ]


def _environment(function: StackFunction, folder: Path) -> dict[str, str]:
    merged: dict[str, str] = {}
    for name in function.environment_file:
        merged |= _read(folder / name, EnvironmentFile).environment
    return merged


def _read(path: Path, kind: type[T]) -> T:
    yaml = _yaml()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_STACK_BYTES + 1)
    except OSError as error:
        raise StackError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_STACK_BYTES:
        raise StackError(f"{path} has more than {MAX_STACK_BYTES} bytes")
    try:
        for token in yaml.scan(text):
            found = _SUBSTITUTION.search(token.value if isinstance(token, yaml.ScalarToken) else "")
            if found:
                raise StackError(
                    f"{path}, line {token.start_mark.line + 1}: {found.group()} is replaced by faas-cli and "
                    "not here: write the value, or check a copy made with `envsubst` (which knows no `:-`)"
                )
        value = yaml.load(text, Loader=yaml.BaseLoader)  # makes texts, lists and maps only
        if (count := _values(value, {})) > MAX_VALUES:
            raise StackError(f"{path}: its aliases make {count} values of it, at most {MAX_VALUES} are taken")
        return msgspec.convert(_without_empty(value) or {}, kind)
    except yaml.YAMLError as error:
        raise StackError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except (msgspec.ValidationError, RecursionError, ValueError) as error:
        raise StackError(f"{path} is no stack file: {error}") from error


def _values(value: object, known: dict[int, int]) -> int:
    """Values in a tree whose parts may be the same object in many places."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(one, known) for one in inner)
    return known[id(value)]


def _without_empty(value: object) -> object:
    """A key without a value (`labels:`) counts as absent, except where any text may stand."""
    if not isinstance(value, dict):
        return value
    texts = ("environment", "labels", "annotations")
    return {
        key: _without_empty(member) if key not in texts or not isinstance(member, dict) else member
        for key, member in value.items()
        if member != ""
    }


def _yaml() -> ModuleType:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise StackError("stack files are read with PyYAML: pip install pyyaml") from error
    return yaml
