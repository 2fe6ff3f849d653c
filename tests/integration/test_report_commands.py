"""`keystage status`, `explain`, `top` and shell completion as they are typed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.report_gateway import PASSWORD, ReportGateway
from support.reports import pipeline, report, stage
from typer.testing import CliRunner

from keystage.cli.main import app

KEYSTAGE = (sys.executable, "-m", "keystage.cli.main")
WAIT_S = 40.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>][0-9A-Za-z]?")


@pytest.fixture
def gateway() -> Iterator[ReportGateway]:
    one = ReportGateway()
    yield one
    one.end()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state folder with the gateway's password, as `keystage up` leaves it."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "basic-auth-user").write_text("admin")
    (folder / "basic-auth-password").write_text(PASSWORD)
    return tmp_path


def _run(command: str, gateway: ReportGateway, home: Path, *arguments: str) -> tuple[int, str, str]:
    to = ("--gateway", gateway.url, "--home", str(home))
    done = CliRunner().invoke(app, [command, *arguments, *to])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_status_of_a_world_that_is_well(gateway: ReportGateway, home: Path) -> None:
    code, out, _ = _run("status", gateway, home)
    assert code == 0
    assert out.splitlines()[-1] == "all is well"
    assert {"llm", "echo"} <= {line.split()[0] for line in out.splitlines()}
    assert gateway.asked == ["/system/keystage/report"]


def test_status_of_one_pipeline_has_its_stages(gateway: ReportGateway, home: Path) -> None:
    code, out, _ = _run("status", gateway, home, "llm")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["0", "1", "2", "3"]
    assert "3 key" in out
    assert "llm-stage-3" in out


def test_status_says_what_is_wrong_and_ends_with_1(gateway: ReportGateway, home: Path) -> None:
    ill = pipeline("ill", stages=(stage(0, "ill", ready=0, starting=1),))
    gateway.fixed = report(pipeline(), ill)
    code, out, _ = _run("status", gateway, home)
    assert code == 1
    assert "ill/0: 0 of 2 replicas ready, 1 starting: nothing is served" in out.splitlines()
    assert _run("status", gateway, home, "llm")[0] == 0
    assert _run("status", gateway, home, "ill")[0] == 1


def test_status_as_json(gateway: ReportGateway, home: Path) -> None:
    gateway.fixed = report(trouble="another controller leads")
    code, out, _ = _run("status", gateway, home, "llm", "--json")
    told = json.loads(out)
    assert (code, told["is_well"]) == (1, False)
    assert told["faults"] == [{"about": "controller", "text": "another controller leads"}]
    assert [one["pipeline"] for one in told["report"]["pipelines"]] == ["llm"]


@pytest.mark.slow
def test_a_report_that_stays_as_it_is_is_old(gateway: ReportGateway, home: Path) -> None:
    gateway.fixed = report(at_s=time.time() - 60)
    code, out, _ = _run("status", gateway, home)
    assert code == 1
    assert re.search(r"controller: the report is 6\d s old, at most 5 s are fresh", out)


@pytest.mark.parametrize("ahead_s", [-90.0, 90.0])
def test_another_clock_does_not_make_a_report_old(gateway: ReportGateway, home: Path, ahead_s: float) -> None:
    gateway.ahead_s = ahead_s
    assert _run("status", gateway, home)[0] == 0


@pytest.mark.parametrize("command", [("status",), ("top",), ("explain", "llm/3")])
def test_a_gateway_that_cannot_be_asked_ends_with_2(
    gateway: ReportGateway, home: Path, command: tuple[str, ...]
) -> None:
    gateway.refusal = (503, "no controller has reported yet")
    code, out, err = _run(command[0], gateway, home, *command[1:])
    assert (code, out) == (2, "")
    assert "answered 503: no controller has reported yet" in err
    gateway.refusal = (404, "")
    assert "is it Keystage's own gateway" in _run(command[0], gateway, home, *command[1:])[2]
    gateway.refusal = (200, "{}")
    assert "what is no report" in _run(command[0], gateway, home, *command[1:])[2]
    (home / "credentials" / "basic-auth-password").write_text("wrong")
    code, _, err = _run(command[0], gateway, home, *command[1:])
    assert code == 2
    assert "answered 401: user or password are wrong: --user, --password-file, --home" in err
    (home / "credentials" / "basic-auth-password").unlink()
    err = _run(command[0], gateway, home, *command[1:])[2]
    assert "answered 401: no password was sent, the state folder has none" in err


def test_nobody_there_and_bad_addresses_end_with_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address, words in ((f"http://127.0.0.1:{port}", "is it running"), ("localhost", "must be http://")):
        done = CliRunner().invoke(app, ["status", "--gateway", address, "--home", str(tmp_path)])
        assert done.exit_code == 2
        assert words in done.stderr


def test_explain_tells_decisions_with_their_inputs(gateway: ReportGateway, home: Path) -> None:
    code, out, _ = _run("explain", gateway, home, "llm-stage-3")
    assert code == 0
    assert "1st key stage" in out
    assert "stage 3: 2 -> 3, predicted wait 310 ms > 80 ms" in out
    assert "from predicted wait 310 ms, arrival 14.2/s" in out
    assert _run("explain", gateway, home, "llm/3")[1].splitlines()[:4] == out.splitlines()[:4]
    assert (
        len(_run("explain", gateway, home, "llm/3", "--last", "1")[1].splitlines())
        == len(out.splitlines()) - 1
    )


def test_explain_as_json(gateway: ReportGateway, home: Path) -> None:
    told = json.loads(_run("explain", gateway, home, "llm/3", "--json")[1])
    assert (told["function"], told["pipeline"], told["stage"]["rank"]) == ("llm-stage-3", "llm", 0)
    assert told["decisions"][-1]["inputs"]["predicted_wait_s"] == 0.31


def test_an_unknown_stage_is_answered_with_near_ones(gateway: ReportGateway, home: Path) -> None:
    code, out, err = _run("explain", gateway, home, "llm-stage-8")
    assert (code, out) == (2, "")
    assert "did you mean llm-stage-" in err
    assert _run("status", gateway, home, "lm")[::2] == (2, "keystage: no pipeline 'lm': did you mean llm?\n")


def test_top_without_a_terminal_is_one_table(gateway: ReportGateway, home: Path) -> None:
    code, out, _ = _run("top", gateway, home)
    assert code == 0
    assert "llm" in out
    assert "\x1b" not in out
    assert json.loads(_run("top", gateway, home, "--json")[1])["controller"] == "c-1"


class Terminal:
    """A command on a terminal of its own; what it wrote is kept."""

    def __init__(self, *command: str, columns: int = 40, lines: int = 20) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:  # the child
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell in the background leaves it ignored
            os.environ.update(TERM="xterm", LANG="C.UTF-8", PYTHONUTF8="1")
            for name in ("NO_COLOR", "COLUMNS", "LINES"):
                os.environ.pop(name, None)
            os.execv(command[0], command)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.fd)
        self.text = ""

    def until(self, words: str) -> None:
        """Reads until it has written these words since the last call."""
        end_s = time.monotonic() + WAIT_S
        while words not in ESCAPES.sub("", self.text):
            assert time.monotonic() < end_s, f"{words!r} did not come: {self.text[-2000:]!r}"
            self.read()
        self.text = ""

    def read(self) -> bool:
        """Takes what is there within a moment; False where the command is gone."""
        if select.select([self.fd], [], [], 0.2)[0]:
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:
                return False
            self.text += data.decode("utf-8", "replace")
            return bool(data)
        return True

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def ended(self) -> int:
        """Waits for the end; the exit code."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            self.read()
            pid, state = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                while self.read():  # what it wrote last
                    pass
                return os.waitstatus_to_exitcode(state)
        raise AssertionError("it did not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(gateway: ReportGateway, home: Path) -> Iterator[Terminal]:
    gateway.fixed = report(pipeline("first"), pipeline("second"))
    one = Terminal(*KEYSTAGE, "top", "--gateway", gateway.url, "--home", str(home), "--every", "0.2")
    yield one
    one.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_top_is_live_takes_keys_and_leaves_the_terminal_as_it_was(
    gateway: ReportGateway, terminal: Terminal
) -> None:
    terminal.until("> first")
    terminal.press(b"j")
    terminal.until("> second")
    terminal.press(b"\x1b[A")
    terminal.until("> first")
    terminal.press(b"p")
    terminal.until("PAUSED")
    gateway.fixed = report(pipeline("third"), number=8)
    terminal.press(b"p")
    terminal.until("> third")
    gateway.refusal = (503, "gone")
    terminal.until("no answer")
    terminal.press(b"q")
    assert terminal.ended() == 0
    assert "\x1b[?1049l" in terminal.text  # back from the other screen
    assert termios.tcgetattr(terminal.fd) == terminal.before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(terminal: Terminal, number: int, code: int) -> None:
    terminal.until("> first")
    os.kill(terminal.pid, number)
    assert terminal.ended() == code
    assert "\x1b[?1049l" in terminal.text
    assert termios.tcgetattr(terminal.fd) == terminal.before


@pytest.mark.parametrize(
    ("shell", "words"),
    [("bash", "complete -o default"), ("zsh", "#compdef keystage"), ("fish", "complete --command")],
)
def test_completion_scripts_are_printed(shell: str, words: str) -> None:
    done = subprocess.run([*KEYSTAGE, "--show-completion", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "keystage" in done.stdout


def test_an_unknown_shell_is_refused() -> None:
    done = subprocess.run(
        [*KEYSTAGE, "--show-completion", "tcsh"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "tcsh" in done.stdout + done.stderr


def test_bash_completes_commands() -> None:
    env = {
        **os.environ,
        "_KEYSTAGE_COMPLETE": "complete_bash",
        "COMP_WORDS": "keystage exp",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(KEYSTAGE, capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.split() == ["explain"]
