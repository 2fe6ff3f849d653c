"""A front that is wanted whole goes in one row of its own, and a session's input goes where it opens."""

from __future__ import annotations

from keystage.router.engine import Generation
from keystage.router.sessions import Session
from keystage.wire.api import SessionSpec, Start, Step, decode_to_worker, encode
from keystage.worker.claims import Claims
from keystage.worker.executor import EmulatedDevice, EmulatedExecutor
from keystage.worker.intake import Intake
from keystage.worker.sessions import SessionTable
from keystage.worker.waves import Wave, WaveFormer


def spec(session: int, tokens: int, prompt: int, whole: int, epoch: int = 1) -> SessionSpec:
    known = list(range(tokens))
    return SessionSpec(session, epoch, 1, known, prompt, 50, [], 0.0, 1.0, session, b"heard", whole)


def former(budget: int = 64) -> WaveFormer:
    made = WaveFormer(budget, 8)
    made.add_path(1, 4)
    return made


def rows(wave: Wave | None) -> list[tuple[int, int, int, bool]]:
    assert wave is not None
    found = wave.rows
    return list(zip(found.sessions, found.positions, found.counts, found.sample, strict=True))


def test_the_front_goes_whole_whatever_the_budget() -> None:
    waves = former(budget=64)
    waves.start(spec(5, 1504, 1504, 1504))
    wave = waves.form(1)
    assert rows(wave) == [(5, 0, 1504, True)]
    assert wave is not None
    assert len(wave.ids) == 1504
    assert waves.input_of(5) == b"heard"
    assert waves.input_of(6) == b""


def test_a_replay_opens_with_the_same_row_and_the_rest_follows() -> None:
    waves = former(budget=64)
    waves.start(spec(5, 1540, 1504, 1504, epoch=2))
    assert rows(waves.form(1)) == [(5, 0, 1504, False)]
    assert rows(waves.form(1)) == [(5, 1504, 36, True)]


def test_two_fronts_travel_one_after_another_beside_decoding_sessions() -> None:
    waves = WaveFormer(64, 8)
    waves.add_path(1, 1)
    for session in (5, 6, 7):
        waves.start(spec(session, 100, 100, 100))
    opened: list[list[tuple[int, int]]] = []
    for _ in range(3):
        wave = waves.form(1)
        assert wave is not None
        opened.append(list(zip(wave.rows.sessions, wave.rows.counts, strict=True)))
        sampled = [9] * len(wave.rows.sessions)
        waves.returned(Step(1, wave.wave, 0, "", [], [], "", wave.rows, sampled, None))
    assert opened == [[(5, 100)], [(5, 1), (6, 100)], [(5, 1), (6, 1), (7, 100)]]


def test_the_router_keeps_the_input_and_sends_it_with_every_epoch() -> None:
    request = Generation([0] * 8, 4, 0.0, 1.0, 3, [], input=b"sound", whole=8)
    session = Session(1, request, list(request.prompt), 0.0, 9.0, epoch=2, path=7)
    assert request.nbytes == 4 * 8 + 5
    sent = decode_to_worker(encode(Start([session.spec()])))
    assert isinstance(sent, Start)
    assert (sent.specs[0].input, sent.specs[0].whole) == (b"sound", 8)


class Hearing(EmulatedExecutor):
    """Notes what it was given."""

    def __init__(self) -> None:
        super().__init__(EmulatedDevice(), 2, 8, 97)
        self.given: list[tuple[int, bytes]] = []

    def take_input(self, session: int, data: bytes) -> None:
        self.given.append((session, data))


class Deaf:
    """An executor that takes tokens only."""

    kv_blocks = (100, 100)

    def __init__(self) -> None:
        self.closed: list[int] = []

    def open(self, session: int, tokens: int) -> None:
        pass

    def close(self, session: int) -> None:
        self.closed.append(session)


def opening(stage: int) -> Step:
    waves = former()
    waves.start(spec(5, 51, 51, 51))
    wave = waves.form(1)
    assert wave is not None
    return Step(1, wave.wave, stage, "router", ["a", "b"], ["a", "b"], "a", wave.rows, [], None)


def test_only_the_first_stage_gets_the_input() -> None:
    for stage, given in ((0, [(5, b"heard")]), (1, [])):
        executor = Hearing()
        intake = Intake("w", executor, SessionTable(), Claims(), lambda _session: b"heard")
        taken = intake.take(opening(stage), is_first_visit=True, has_input=True)
        assert (taken.keep, executor.given) == ([0], given)


def test_an_executor_that_takes_no_input_ends_the_session_by_name() -> None:
    executor = Deaf()
    intake = Intake("w", executor, SessionTable(), Claims(), lambda _session: b"heard")  # type: ignore[arg-type]
    taken = intake.take(opening(0), is_first_visit=True, has_input=True)
    assert taken.keep == []
    (failure,) = taken.failures
    assert failure.reason == "w takes tokens only, a session came with 5 bytes of input"
    assert not failure.retryable
    assert executor.closed == [5]
