"""Where the output of commands goes: full disks, other encodings, pipes that close; versions, completion."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.report_gateway import PASSWORD, ReportGateway
from support.reports import pipeline, report

KEYSTAGE = (sys.executable, "-m", "keystage.cli.main")
WAIT_S = 60.0
ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.fixture
def gateway() -> Iterator[ReportGateway]:
    one = ReportGateway()
    yield one
    one.end()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state folder with the gateway's password."""
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "basic-auth-password").write_text(PASSWORD)
    return tmp_path


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        (*KEYSTAGE, *arguments),
        capture_output=True,
        timeout=WAIT_S,
        env={**os.environ, **variables},
        check=False,
    )


def _to(gateway: ReportGateway, home: Path) -> tuple[str, ...]:
    return ("--gateway", gateway.url, "--home", str(home))


@pytest.mark.parametrize(
    "command", [("status",), ("status", "--json"), ("top",), ("explain", "llm/3"), ("doctor",)]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(
    gateway: ReportGateway, home: Path, command: tuple[str, ...], unbuffered: str
) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            (*KEYSTAGE, *command, *_to(gateway, home)),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "keystage: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_a_full_disk_under_a_file_is_not_laid_to_standard_output(tmp_path: Path) -> None:
    """A limit on the size of files, as a full disk refuses them."""

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = subprocess.run(
        (*KEYSTAGE, "emulate", "em", "--out", str(tmp_path / "em")),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        preexec_fn=small,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert "standard output" not in done.stderr


def test_a_pipe_that_closes_is_silent(gateway: ReportGateway, home: Path) -> None:
    gateway.fixed = report(*(pipeline(f"p{number:04}") for number in range(2000)), at_s=time.time())
    asked = subprocess.Popen(
        (*KEYSTAGE, "top", *_to(gateway, home)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert asked.stdout is not None
    assert asked.stderr is not None
    asked.stdout.readline()
    asked.stdout.close()
    assert asked.wait(WAIT_S) == 1
    assert asked.stderr.read() == b""
    asked.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["été", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "a\x1b]0;owned\x07b", "\u202eabc"])
def test_names_of_every_kind_in_a_terminal_of_ascii(gateway: ReportGateway, home: Path, name: str) -> None:
    odd = pipeline(name, missing=f"router {name} \N{HORIZONTAL ELLIPSIS} is gone")
    gateway.fixed = report(odd, trouble=f"cannot act on {name}")
    for command in (("status",), ("top",), ("explain", f"{name}-stage-0")):
        done = _run(*command, *_to(gateway, home), **ASCII)
        assert b"Traceback" not in done.stderr
        assert not set(done.stdout + done.stderr) - set(b"\n") & set(range(0x20))
        assert done.returncode in (0, 1, 2)
    told = json.loads(_run("status", "--json", *_to(gateway, home), **ASCII).stdout.decode("utf-8"))
    assert told["report"]["pipelines"][0]["pipeline"] == name


def test_the_version() -> None:
    done = _run("--version")
    assert done.returncode == 0
    assert done.stdout.decode().startswith("keystage ")


def _completed(line: str, **variables: str) -> list[str]:
    """What bash is given for the last word: it cuts words at `:` and `=`, and tells one a line."""
    words = re.findall(r"[^ :=]+|[:=]+", line) + [""] * line.endswith(" ")
    told = {"_KEYSTAGE_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words)}
    done = _run(**told, COMP_CWORD=str(len(words) - 1), **variables)
    assert done.stderr == b""
    return done.stdout.decode().split()


@pytest.mark.slow
def test_names_are_completed_from_the_gateway_that_is_named(gateway: ReportGateway, home: Path) -> None:
    gateway.fixed = report(pipeline("llm"), pipeline("lab"), pipeline("l; reboot"))
    to = " ".join(_to(gateway, home))
    assert _completed(f"keystage status {to} l") == ["llm", "lab"]
    assert _completed(f"keystage explain {to} llm/") == ["llm/0", "llm/1", "llm/2", "llm/3"]
    assert _completed(f"keystage explain {to} llm-stage-3") == ["llm-stage-3"]
    assert _completed(f"keystage explain {to} e") == ["echo"]
    assert _completed(f"keystage status --gateway={gateway.url} --home={home} l") == ["llm", "lab"]
    known = {"OPENFAAS_URL": gateway.url, "KEYSTAGE_HOME": str(home)}
    assert _completed("keystage explain la", **known)[:3] == ["lab", "lab/0", "lab-stage-0"]


def test_nothing_is_completed_and_nothing_said_without_an_answer(gateway: ReportGateway, home: Path) -> None:
    nobody = f"keystage status --gateway http://127.0.0.1:1 --home {home} l"
    assert _completed(nobody) == []
    (home / "credentials" / "basic-auth-password").write_text(
        ""
    )  # an empty one is refused before it is asked
    assert _completed(f"keystage status {' '.join(_to(gateway, home))} l") == []
    assert _completed("keystage status --gateway nonsense l") == []


@pytest.mark.parametrize(
    ("shell", "file"),
    [("bash", ".bash_completions/keystage.sh"), ("zsh", ".zfunc/_keystage"),
     ("fish", ".config/fish/completions/keystage.fish")],
)  # fmt: skip
def test_completion_is_installed_for_the_shell_that_is_named(tmp_path: Path, shell: str, file: str) -> None:
    done = _run("--install-completion", shell, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "_KEYSTAGE_COMPLETE" in (tmp_path / file).read_text()
    assert f"{shell}: completion is in {tmp_path / file}".encode() in done.stdout


def test_an_unknown_shell_is_installed_nowhere(tmp_path: Path) -> None:
    done = _run("--install-completion", "tcsh", HOME=str(tmp_path))
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_time_out_without_end_is_refused(command: str) -> None:
    done = _run(command, "--timeout", "inf")
    assert done.returncode == 2
    assert b"3600" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_shell_completes_a_line_with_an_address_in_it(gateway: ReportGateway, home: Path) -> None:
    """bash itself, which cuts the line into words."""
    line = f"keystage explain --home {home} --gateway {gateway.url} llm-stage-"
    command = Path(sys.executable).parent
    cut = re.sub("([:=]+)", r" \1 ", line)  # as readline does: at blanks and at $COMP_WORDBREAKS
    script = (
        'eval "$(keystage --show-completion bash)"; '
        f"COMP_WORDS=({cut}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        '_keystage_completion keystage; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ("bash", "--norc", "-c", script),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "PATH": f"{command}:{os.environ['PATH']}"},
        check=True,
    )
    assert done.stdout.split() == [f"llm-stage-{index}" for index in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (("emulate", "em"), b"is emulated: its times are"),
        (("split", "program:diffusion"), b"is a stream program"),
    ],
)
def test_a_bundle_without_parameters_is_not_timed(
    tmp_path: Path, made: tuple[str, str], words: bytes
) -> None:
    bundle = str(tmp_path / "bundle")
    assert _run(*made, "--out", bundle).returncode == 0
    done = _run("profile", bundle, "--json")
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr
    assert done.stderr.count(b"\n") == 1
