"""Nothing in the source tree runs what it reads: by the syntax trees of all modules.

Pickle and its kin execute code of whoever wrote the file. Where processes of one program hand each other
objects by `multiprocessing`, which pickles, parent and child are the same program of the same user: no bytes
of others go that way. Which modules do is listed here, so that a new one is looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("controller", "keysmanager", "stage-function", "loadgen", "benchmarks")
FILES = sorted(file for part in PARTS for file in (ROOT / part / "src").rglob("*.py"))
RUNNING = frozenset(
    {
        "pickle",
        "_pickle",
        "cPickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "copyreg",
        "code",
        "codeop",
    }
)
"""Modules that make code or objects of bytes."""
POOLS = {"multiprocessing", "concurrent.futures.process"}
WITHIN_ONE_PROGRAM = {
    "controller/src/keystage/training/session.py": "epochs of one training, in processes of its own",
    "keysmanager/src/keystage/keysmanager/forkserver.py": "imported ahead for torch, used by nobody",
}
"""Beside benchmarks, which all start processes of their own."""


def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> object:
    """Value of a keyword that is a constant; absent: `...`."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ast.unparse(given.value)
    return ...


def faults(tree: ast.Module) -> list[str]:
    """What runs, or could run, bytes as code."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in RUNNING]
    for name, call in calls(tree):
        found += [f"line {call.lineno}: {name}: {why}" for why, is_one in RULES.items() if is_one(name, call)]
    return found


def given(call: ast.Call, name: str) -> bool:
    """Whether a switch is on, or may be."""
    return keyword(call, name) not in (..., False)


RULES: dict[str, Callable[[str, ast.Call], bool]] = {
    "runs text": lambda name, _: name.removeprefix("builtins.") in ("eval", "exec", "compile", "__import__"),
    "torch.load without weights_only=True": lambda name, call: (
        name == "torch.load" and keyword(call, "weights_only") is not True
    ),
    "pickles in arrays": lambda _, call: given(call, "allow_pickle"),
    "YAML that makes objects": lambda name, call: (
        name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")
        and keyword(call, "Loader") not in ("yaml.BaseLoader", "yaml.SafeLoader")
    ),
    "a shell": lambda name, call: (
        name in ("os.system", "os.popen")
        or name.endswith(("subprocess_shell", "getoutput"))
        or (name.startswith("subprocess.") and given(call, "shell"))
    ),
    "ZeroMQ's pickles": lambda name, _: name.endswith(("send_pyobj", "recv_pyobj")),
    "an archive whose names are not checked": lambda name, call: (
        name.endswith((".extractall", ".unpack_archive")) and keyword(call, "filter") != "data"
    ),
    "code out of a model's folder": lambda _, call: given(call, "trust_remote_code"),
}


def test_there_are_files() -> None:
    assert len(FILES) > 500


def test_nothing_makes_code_or_objects_of_what_it_reads() -> None:
    found = {
        str(file.relative_to(ROOT)): said for file in FILES if (said := faults(parsed(file.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "import shelve",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=x)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
        "socket.recv_pyobj()",
        "archive.extractall(folder)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_is_looked_for_is_found(text: str) -> None:
    assert faults(parsed(text))


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "np.load(path, allow_pickle=False)",
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.BaseLoader)",
        "subprocess.run(command, shell=False)",
        "model.eval()",
        "re.compile(text)",
    ],
)
def test_and_nothing_else(text: str) -> None:
    assert not faults(parsed(text))


def test_who_hands_objects_to_processes_of_its_own_is_known() -> None:
    def uses(tree: ast.Module) -> bool:
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if node.value.startswith("multiprocessing.") else set()
        return any(
            name.split(".")[0] == "multiprocessing" or name.endswith("ProcessPoolExecutor") for name in found
        )

    using: Callable[[Path], bool] = lambda file: uses(parsed(file.read_text()))  # noqa: E731
    found = {str(file.relative_to(ROOT)) for file in FILES if "benchmarks" not in file.parts and using(file)}
    assert found == set(WITHIN_ONE_PROGRAM)


SECRET_NAMES = re.compile(
    r"(?i)password|authorization|bearer|credential|api_?key|internal_token|_hmac|digest\(\)|proof|login\b"
)
"""What a comparison of secrets would be called; a token is also a piece of text, and not looked for alone."""


def plain_comparisons(tree: ast.Module) -> list[str]:
    """Comparisons by `==` and `!=` of what could be a secret with something that is not written there."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) for side in sides):
                continue
            text = ast.unparse(node)
            if SECRET_NAMES.search(text):
                found.append(f"line {node.lineno}: {text}")
    return found


def test_secrets_are_compared_in_constant_time() -> None:
    assert plain_comparisons(parsed("given == self._password"))
    assert plain_comparisons(parsed("headers['authorization'] != f'Bearer {token}'"))
    assert not plain_comparisons(parsed("hmac.compare_digest(given, self._password)"))
    served = [file for file in FILES if "benchmarks" not in file.parts]
    found = {
        str(file.relative_to(ROOT)): said
        for file in served
        if (said := plain_comparisons(parsed(file.read_text())))
    }
    # Digests of contents are no secrets: what they are compared for is whether bytes are whole.
    contents = {name: said for name, said in found.items() if all("digest()" in one for one in said)}
    assert {name: said for name, said in found.items() if name not in contents} == {}
