"""Which pipeline an invocation of a trace goes to.

Comes after `options` and before `plan`. `--map` is given once or several times; each value is

    FUNCTION=PIPELINE   one function of the trace, by its whole name (`app/func`)
    FILE                the same, a line each: `function,pipeline`; `#` begins a comment line
    hash:P,Q,...        pipelines over which functions that are not named are hashed
    strict              functions that are not named are refused

Functions that are not named go to one of the `hash:` pipelines, or, without any, to one of those that
are named: always the same one for a function, by the SHA-256 of its name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_MAX_NAMED = 5


class MappingError(ValueError):
    """A mapping that cannot be used; names the value, and the line of a file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mapping:
    """From functions to pipelines.

    Attributes:
        pipelines: names, in the order in which they were given first.
        named: index into pipelines by function.
        hashed: indices over which other functions are spread.
        is_strict: whether there may be no others.
    """

    pipelines: tuple[str, ...]
    named: dict[str, int]
    hashed: tuple[int, ...]
    is_strict: bool

    def target(self, function: str) -> int:
        """Index of the pipeline of a function.

        Raises:
            MappingError: it is not named, and the mapping is strict.
        """
        found = self.named.get(function)
        if found is not None:
            return found
        if self.is_strict:
            raise MappingError(
                f"--map strict: function {function!r} of the trace is not among the {len(self.named)} mapped"
            )
        digest = hashlib.sha256(function.encode()).digest()
        return self.hashed[int.from_bytes(digest[:8]) % len(self.hashed)]

    def addresses(self, gateway_url: str) -> tuple[str, ...]:
        """Base addresses of the pipelines behind a gateway."""
        return tuple(f"{gateway_url.rstrip('/')}/function/{name}" for name in self.pipelines)


def mapping(values: Sequence[str]) -> Mapping:
    """Reads the values of `--map`, and the files they name.

    Raises:
        MappingError: a value or a line that says nothing, contradicts another, or names no pipeline.
    """
    pairs: dict[str, str] = {}
    hashed: list[str] = []
    order: list[str] = []
    is_strict = False
    for value in values:
        if value == "strict":
            is_strict = True
        elif value.startswith("hash:"):
            hashed += [_pipeline(name, value) for name in value.removeprefix("hash:").split(",")]
        elif "=" in value:
            function, _, pipeline = value.rpartition("=")
            _put(pairs, function.strip(), _pipeline(pipeline, value), value)
        else:
            for function, pipeline, where in _lines(Path(value)):
                _put(pairs, function, _pipeline(pipeline, where), where)
    for name in [*pairs.values(), *hashed]:
        if name not in order:
            order.append(name)
    if is_strict and hashed:
        raise MappingError("--map strict and --map hash: contradict each other: strict leaves none to hash")
    if not order:
        raise MappingError(f"--map names no pipeline, got {', '.join(values) or 'nothing'}")
    index = {name: place for place, name in enumerate(order)}
    spread = dict.fromkeys(hashed) if hashed else dict.fromkeys(order)
    return Mapping(
        tuple(order),
        {function: index[name] for function, name in pairs.items()},
        tuple(index[name] for name in spread),
        is_strict,
    )


def unseen(made: Mapping, functions: Iterable[str]) -> str:
    """Functions of a mapping that a trace does not hold, in words for a note; empty if there are none."""
    missing = sorted(set(made.named) - set(functions))
    if not missing:
        return ""
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return f"--map names functions without an arrival: {', '.join(missing[:_MAX_NAMED])}{more}"


def _put(pairs: dict[str, str], function: str, pipeline: str, where: str) -> None:
    if not function:
        raise MappingError(f"--map {where}: a function's name is needed before the pipeline's")
    if pairs.setdefault(function, pipeline) != pipeline:
        raise MappingError(f"--map {where}: function {function!r} is mapped to {pairs[function]!r} already")


def _pipeline(name: str, where: str) -> str:
    name = name.strip()
    if _NAME.fullmatch(name) is None:
        raise MappingError(
            f"--map {where}: a pipeline is named by letters, digits, '-', '_', '.', got {name!r}"
        )
    return name


def _lines(path: Path) -> Iterable[tuple[str, str, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MappingError(f"--map {path} is not text: {error}") from error
    except OSError as error:
        raise MappingError(
            f"--map {path}: neither function=pipeline, hash:..., strict nor a file that can be read: "
            f"{error.strerror or error}"
        ) from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        function, comma, pipeline = line.rpartition(",")
        where = f"{path}, line {number}"
        if not comma:
            raise MappingError(f"--map {where}: expected function,pipeline, found {line.strip()[:80]!r}")
        yield function.strip(), pipeline.strip(), where
