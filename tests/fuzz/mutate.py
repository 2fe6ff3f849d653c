"""Changes inputs: trees of JSON and MessagePack by their values, text by its words, bytes by their place.

Coverage-guided or not, bytes flipped at random seldom make JSON of JSON; these changes keep the form most of
the time and put in what parsers get wrong: absurd sizes, other types, numbers at the edges, deep nesting.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fuzz.target import Form

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**63 - 1,
    -(2**63),
    2**64 - 1, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e16, 1e308, -1e308, float("inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", "0", "\0", "a\0b", "../../etc/passwd", "/", ".", "..", "\ud800", "\u202e", "é" * 40, "x" * 5000,
    "9" * 5000,
    "१", "-1", "1e999", "nan", "inf", "true", "null", "{}", "[]", "{{ 7 }}", "%s%n", "a b", "\r\n", "A" * 300,
    "http://[", "http://127.0.0.1:99999/", "tcp://:1", "2262-04-11T23:47:17Z", "0x10", "1_000", "1k",
    "9" * 400,
)  # fmt: skip
SPOTS = re.compile(rb"-?\d+(?:\.\d+)?|[A-Za-z_]+|[^\sA-Za-z0-9_]")
TEXT_NUMBERS = (
    b"0", b"-1", b"1", b"99999999999999999999", b"18446744073709551616", b"1152921504606846976", b"1e999",
    b"nan",
    b"inf", b"-0", b"1e-400", b"0.1", b"4294967296", b"2147483648", b"9" * 5000, b"1_000", b"0x1f",
    "१".encode(), b"",
)  # fmt: skip
DEEP = 3000


def mutator(form: Form, words: Sequence[str] = ()) -> Callable[[bytes, random.Random], bytes]:
    """The change for one form of inputs."""
    if form == "json":
        return lambda data, rng: _of_tree(data, rng, words, _from_json, _to_json)
    if form == "msgpack":
        return lambda data, rng: _of_tree(data, rng, words, msgspec.msgpack.decode, _to_msgpack)
    if form == "text":
        return lambda data, rng: of_text(data, rng, words)
    return lambda data, rng: of_bytes(data, rng, words)


def of_bytes(data: bytes, rng: random.Random, words: Sequence[str]) -> bytes:
    """Some bytes flipped, put in, taken out, doubled; integers of every width set to the edges."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(7):
            case 0 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 1:
                made[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del made[at : at + rng.randint(1, 16)]
            case 3:
                made[at:at] = made[at : at + rng.randint(1, 64)]
            case 4:
                width = rng.choice((1, 2, 4, 8))
                value = rng.choice((0, 1, 127, 255, 2**15, 2**31, 2**60, 2**63, 2**64 - 1)) % (1 << 8 * width)
                made[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
            case 5:
                del made[at:]
            case _ if words:
                made[at:at] = rng.choice(words).encode(errors="surrogatepass")
    return bytes(made)


def of_text(data: bytes, rng: random.Random, words: Sequence[str]) -> bytes:
    """Numbers, words, signs and lines exchanged; sometimes bytes."""
    if rng.random() < 0.15:
        return of_bytes(data, rng, words)
    if rng.random() < 0.3:
        return _of_lines(data, rng)
    spots = list(SPOTS.finditer(data))
    if not spots:
        return data + rng.choice(TEXT_NUMBERS) + rng.choice(TEXTS).encode(errors="surrogatepass")
    spot = rng.choice(spots)
    choices: list[bytes] = [
        *TEXT_NUMBERS,
        rng.choice(spots)[0],
        rng.choice(TEXTS).encode(errors="surrogatepass"),
    ]
    if words:
        choices += [rng.choice(words).encode(errors="surrogatepass")] * 6
    return data[: spot.start()] + rng.choice(choices) + data[spot.end() :]


def _of_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = rng.choice(
                (b"", b" ", b"\t- ", b"\xff\xfe", b"\xef\xbb\xbf" + lines[at], lines[at] * 3)
            )
        case _:
            cells = lines[at].split(b",")
            cells[rng.randrange(len(cells))] = rng.choice((*TEXT_NUMBERS, b'"', b'"a,b"', b"a"))
            lines[at] = b",".join(cells)
    return b"\n".join(lines)


def _from_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _to_json(tree: Any, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return json.dumps(tree).encode()
    return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _to_msgpack(tree: Any, rng: random.Random) -> bytes:
    return msgspec.msgpack.encode(tree)


def _of_tree(
    data: bytes,
    rng: random.Random,
    words: Sequence[str],
    decode: Callable[[bytes], Any],
    encode: Callable[[Any, random.Random], bytes],
) -> bytes:
    if rng.random() < 0.1:
        return of_bytes(data, rng, words)
    try:
        tree = decode(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            tree = _changed(tree, rng, words)
        made = encode(tree, rng)
    except Exception:  # noqa: BLE001  # what is no tree any more is changed as bytes
        return of_bytes(data, rng, words)
    if rng.random() < 0.02 and encode is _to_json:
        return made.replace(rng.choice((b"1", b"0", b"null", b'""')), b"[" * DEEP + b"]" * DEEP, 1)
    if rng.random() < 0.02 and encode is _to_json and made.startswith(b"{"):
        return made[:1] + made[1:-1].split(b",", 1)[0] + b"," + made[1:]  # a member twice
    return made


def _changed(tree: Any, rng: random.Random, words: Sequence[str]) -> Any:
    """The same tree with one node changed, the deeper ones more often."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        copy = dict(tree)
        match rng.randrange(12):
            case 0:
                del copy[key]
            case 1:
                copy[rng.choice((*TEXTS, *words))] = copy[key]
            case 2 if words:
                copy[rng.choice(words)] = _value(rng, words)
            case _:
                copy[key] = _changed(copy[key], rng, words)
        return copy
    if isinstance(tree, (list, tuple)) and tree and rng.random() < 0.9:
        at = rng.randrange(len(tree))
        made = list(tree)
        match rng.randrange(10):
            case 0:
                del made[at]
            case 1:
                made.insert(at, rng.choice(made))
            case 2:
                made *= rng.choice((2, 3, 50))
            case _:
                made[at] = _changed(made[at], rng, words)
        return made
    return _value(rng, words, tree)


def _value(rng: random.Random, words: Sequence[str], old: Any = None) -> Any:
    match rng.randrange(10):
        case 0 | 1 | 2:
            return rng.choice(NUMBERS)
        case 3 | 4:
            return rng.choice((*TEXTS, *words))
        case 5:
            return rng.choice((None, True, False, [], {}, [None], {"a": 1}, [[]], [0] * 300))
        case 6 if isinstance(old, str):
            at = rng.randrange(len(old) + 1)
            return old[:at] + rng.choice((*TEXTS, *words)) + old[at:]
        case 7 if isinstance(old, (int, float)):
            return rng.choice((-old, old + 1, old * 2, str(old)))
        case 8:
            return [old] * rng.choice((1, 2, 100))
        case _:
            return rng.choice((*words, *NUMBERS))
