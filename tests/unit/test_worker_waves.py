"""Wave forming, case by case."""

from __future__ import annotations

from keystage.wire.api import SessionSpec, Step
from keystage.worker.waves import Wave, WaveFormer


def spec(session: int, prompt: int, *, max_tokens: int = 50, epoch: int = 1, path: int = 1) -> SessionSpec:
    return SessionSpec(session, epoch, path, list(range(prompt)), prompt, max_tokens, [], 0.0, 1.0, 0)


def former(budget: int = 64, max_rows: int = 8, waves: int = 1) -> WaveFormer:
    made = WaveFormer(budget, max_rows)
    made.add_path(1, waves)
    return made


def back(former: WaveFormer, wave: Wave, tokens: list[int]) -> list[int]:
    return former.returned(Step(wave.path, wave.wave, 0, "", [], [], "", wave.rows, tokens, None))


def test_a_long_prompt_travels_in_chunks_and_samples_at_its_end() -> None:
    waves = former(budget=20, waves=3)
    waves.start(spec(5, 45))
    formed = [waves.form(1) for _ in range(4)]
    rows = [wave.rows for wave in formed if wave is not None]
    assert [(r.positions, r.counts, r.sample, r.opens) for r in rows] == [
        ([0], [20], [False], [95]),
        ([20], [20], [False], [0]),
        ([40], [5], [True], [0]),
    ]
    assert formed[3] is None


def test_with_one_row_a_wave_prompts_and_decodes_take_turns() -> None:
    waves = former(max_rows=1)
    for session in range(3):
        waves.start(spec(session, 1))
    first = []
    for _ in range(3):
        wave = waves.form(1)
        assert wave is not None
        first += wave.rows.sessions
        back(waves, wave, [9])
    waves.start(spec(7, 40))
    then = []
    for _ in range(4):
        wave = waves.form(1)
        assert wave is not None
        then += wave.rows.sessions
        back(waves, wave, [9])
    assert sorted(first) == [0, 1, 2]
    assert 7 in then


def test_a_wave_of_an_older_epoch_changes_nothing() -> None:
    waves = former(waves=2)
    waves.start(spec(5, 3))
    old = waves.form(1)
    assert old is not None
    assert waves.start(spec(5, 3, epoch=2)) is None
    assert waves.start(spec(5, 4, epoch=2)) is None
    back(waves, old, [77])
    new = waves.form(1)
    assert new is not None
    assert (new.rows.epochs, new.ids) == ([2], [0, 1, 2])


def test_a_wave_of_a_forgotten_path_is_ignored() -> None:
    waves = former()
    waves.start(spec(5, 3))
    wave = waves.form(1)
    assert wave is not None
    waves.remove_path(1)
    assert back(waves, wave, [3]) == []
    assert waves.paths == []
    assert not waves.can_form()


def test_an_end_token_finishes_a_session() -> None:
    waves = former()
    waves.start(SessionSpec(5, 1, 1, [1], 1, 50, [99], 0.0, 1.0, 0))
    wave = waves.form(1)
    assert wave is not None
    assert back(waves, wave, [99]) == [5]
    assert not waves.can_form()
