"""Who holds KV blocks on a path, event by event: admission, growth, preemption, resumption, probes."""

from __future__ import annotations

import msgspec

from keystage.wire.api import UNBOUNDED, SessionSpec, Step
from keystage.worker.room import PROBE_S, PathRoom
from keystage.worker.waves import Wave, WaveFormer

PATH = 1


def spec(session: int, prompt: int, *, max_tokens: int = 30, tokens: int = 0, epoch: int = 1) -> SessionSpec:
    known = list(range(prompt + tokens))
    return SessionSpec(session, epoch, PATH, known, prompt, max_tokens, [], 0.0, 1.0, 0)


class Owner:
    """A former with one path of `blocks`, and stages that do as they are told."""

    def __init__(self, blocks: int, *, budget: int = 64, max_rows: int = 8, waves: int = 1) -> None:
        self.former = WaveFormer(budget, max_rows)
        self.former.add_path(PATH, waves, blocks)

    def form(self, now_s: float = 0.0) -> Wave:
        assert self.former.can_form(now_s)
        wave = self.former.form(PATH, now_s)
        assert wave is not None
        return wave

    def rests(self, now_s: float = 0.0) -> bool:
        return not self.former.can_form(now_s) or self.former.form(PATH, now_s) is None

    def back(
        self, wave: Wave, free: int, *, room: int | None = None, starved: tuple[int, ...] = ()
    ) -> list[int]:
        keep = [i for i, session in enumerate(wave.rows.sessions) if session not in starved]
        rows = wave.rows
        for name in ("sessions", "epochs", "positions", "counts", "sample", "holds"):
            values = getattr(rows, name)
            values[:] = [values[i] for i in keep] if values else []
        tokens = [9 if sample else -1 for sample in rows.sample]
        step = Step(
            PATH, wave.wave, 0, "", [], [], "", rows, tokens, None, starved=list(starved),
            free_blocks=free, room_blocks=free if room is None else room,
        )  # fmt: skip
        return self.former.returned(step, 0.0)

    def waiting(self) -> list[int]:
        return self.former.waiting(PATH)


def test_a_session_waits_until_its_whole_prompt_and_the_watermark_fit() -> None:
    owner = Owner(4)
    owner.former.start(spec(1, 33))
    owner.former.start(spec(2, 10))
    wave = owner.form()
    # Three of four blocks go to the first; one more would leave nothing for its growth.
    assert wave.rows.sessions == [1]
    assert (wave.claim, wave.claim_blocks) == (2, 1)
    assert owner.rests()
    owner.back(wave, 1)
    assert owner.form().rows.sessions == [1]
    assert owner.waiting() == [2]


def test_an_older_session_is_not_overtaken_by_a_smaller_one() -> None:
    owner = Owner(6)
    owner.former.start(spec(1, 60))
    first = owner.form()
    owner.former.start(spec(3, 1))
    owner.former.start(spec(2, 40))
    owner.back(first, 2)
    wave = owner.form()
    assert wave.rows.sessions == [1]
    assert (wave.claim, wave.claim_blocks) == (2, 3)
    assert sorted(owner.waiting()) == [2, 3]


def test_chunks_take_their_blocks_as_they_go_and_are_counted_before_others_enter() -> None:
    owner = Owner(8, budget=32, waves=2)
    owner.former.start(spec(1, 96))
    first = owner.form()
    assert (first.rows.counts, first.rows.holds) == ([32], [])
    owner.former.start(spec(2, 40))
    second = owner.form()
    # Six blocks are the first prompt's, though it holds two as yet.
    assert second.rows.sessions == [1]
    assert second.claim == 2


def test_the_youngest_gives_its_blocks_to_an_older_session_and_waits() -> None:
    owner = Owner(4)
    owner.former.start(spec(1, 16, max_tokens=40))
    owner.former.start(spec(2, 16, max_tokens=40))
    wave = owner.form()
    assert wave.rows.sessions == [1, 2]
    owner.back(wave, 2)
    for _ in range(16):  # both grow into their second block, and fill it
        wave = owner.form()
        assert (wave.rows.counts, wave.drops) == ([1, 1], [])
        owner.back(wave, 0)
    wave = owner.form()
    assert (wave.rows.sessions, wave.drops, wave.drop_epochs) == ([1], [2], [1])
    assert (owner.former.preemptions, owner.waiting()) == (1, [2])
    owner.back(wave, 1)
    assert owner.form().claim_blocks == 4  # 33 tokens, and 16 positions more


def test_it_is_replayed_from_its_tokens_when_there_is_room() -> None:
    owner = Owner(4, budget=32)
    owner.former.start(spec(1, 16, max_tokens=18))
    owner.former.start(spec(2, 16, max_tokens=40))
    for wave in range(17):
        owner.back(owner.form(), 0 if wave else 2)
    assert owner.back(owner.form(), 1) == [1]  # the older one ends, after it took a third block
    assert owner.waiting() == [2]
    wave = owner.form()
    assert (wave.rows.sessions, wave.drops) == ([], [1])
    owner.back(wave, 4)
    wave = owner.form()
    assert (wave.rows.sessions, wave.rows.positions, wave.rows.counts) == ([2], [0], [32])
    assert (wave.rows.holds, wave.rows.opens) == ([49], [56])
    owner.back(wave, 0)
    wave = owner.form()
    assert (wave.rows.counts, wave.rows.sample, wave.rows.holds) == ([1], [True], [])


def test_a_session_with_a_row_on_its_way_is_never_preempted() -> None:
    owner = Owner(3, waves=2, max_rows=1)
    owner.former.start(spec(1, 16))
    owner.former.start(spec(2, 16))
    first, second = owner.form(), owner.form()
    assert (first.rows.sessions, second.rows.sessions) == ([1], [2])
    owner.back(first, 2)
    first = owner.form()  # takes the last block
    owner.back(second, 1)
    assert owner.rests()  # the younger one needs a block: it holds what it has, and waits for news
    assert owner.former.preemptions == 0
    owner.back(first, 0)
    assert owner.form().rows.sessions == [1]


def test_a_starved_session_gives_back_what_it_has_once_its_other_rows_are_back() -> None:
    owner = Owner(10, budget=16, waves=3)
    owner.former.start(spec(1, 48))
    waves = [owner.form() for _ in range(3)]
    owner.back(waves[0], 9)
    owner.back(waves[1], 0, starved=(1,))
    assert owner.former.preemptions == 0
    assert owner.rests()
    owner.back(waves[2], 0, starved=(1,))
    assert (owner.former.preemptions, owner.waiting()) == (1, [1])
    wave = owner.form()
    assert (wave.rows.sessions, wave.drops) == ([], [1])
    owner.back(wave, 3)
    assert owner.rests(0.0)
    assert owner.form(PROBE_S).rows.sessions == []
    assert owner.waiting() == [1]


def test_a_path_on_which_only_others_run_asks_again_and_says_who_waits() -> None:
    owner = Owner(10)
    owner.former.start(spec(1, 16))
    owner.back(owner.form(), 0, starved=(1,))
    wave = owner.form()
    assert (wave.rows.sessions, wave.drops, wave.claim, wave.claim_blocks) == ([], [1], 1, 2)
    owner.back(wave, 8, room=1)  # blocks are free, but an older session of another path waits for them
    assert owner.rests()
    assert owner.former.wake_s(0.0) == PROBE_S
    wave = owner.form(PROBE_S)
    assert (wave.rows.sessions, wave.claim) == ([], 1)
    owner.back(wave, 8, room=8)
    assert owner.form().rows.sessions == [1]


def test_the_last_one_asks_the_stages_for_its_block_though_none_was_free() -> None:
    owner = Owner(10)
    owner.former.start(spec(1, 16))
    owner.back(owner.form(), 0)  # the rest belongs to other paths
    wave = owner.form()
    assert (wave.rows.sessions, wave.rows.positions) == ([1], [16])


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    owner = Owner(4)
    reason = owner.former.start(spec(1, 10, max_tokens=55))
    assert reason == "prompt + max_tokens is 65 positions, 5 KV blocks; a worker on path 1 has 4"
    assert owner.former.start(spec(2, 10, max_tokens=54)) is None
    assert owner.former.sessions == [2]


def test_a_cancelled_session_is_dropped_with_the_next_wave() -> None:
    owner = Owner(3)
    owner.former.start(spec(1, 30, max_tokens=9))
    wave = owner.form()
    owner.former.drop(1, 1)
    owner.back(wave, 1)
    assert owner.rests()  # the router frees it as well: nothing is sent for it alone
    owner.former.start(spec(3, 30, max_tokens=9))
    assert owner.form().drops == [1]


def test_when_nobody_waits_any_more_the_stages_are_told() -> None:
    owner = Owner(3)
    owner.former.start(spec(1, 30, max_tokens=9))
    owner.former.start(spec(2, 30, max_tokens=9))
    wave = owner.form()
    assert wave.claim == 2
    owner.former.drop(1, 1)
    owner.former.drop(2, 1)
    owner.back(wave, 1)
    wave = owner.form()
    assert (wave.rows.sessions, wave.claim, wave.drops) == ([], -1, [1])
    owner.back(wave, 3)
    assert owner.rests()


def test_a_session_that_comes_with_its_kv_state_runs_at_once_and_is_not_dropped_where_it_was() -> None:
    owner = Owner(6)
    owner.former.add_path(2, 1, 6)
    owner.former.start(spec(1, 20))
    owner.back(owner.form(), 4)
    moved = msgspec.structs.replace(spec(1, 20, tokens=4, epoch=2), path=2, kept=22)
    owner.former.start(moved)
    wave = owner.former.form(2)
    assert wave is not None
    rows = wave.rows
    assert (rows.positions, rows.counts, rows.opens, rows.sample) == ([22], [2], [50], [True])
    owner.former.start(spec(3, 1))
    assert owner.form().drops == []


def test_a_session_that_comes_from_another_path_is_a_replay() -> None:
    owner = Owner(10)
    owner.former.start(spec(1, 10, tokens=20, epoch=2))
    wave = owner.form()
    assert (wave.rows.counts, wave.rows.holds) == ([30], [40])  # all it can ever need


def test_a_vanished_row_leaves_its_session_to_the_router() -> None:
    owner = Owner(10)
    owner.former.start(spec(1, 10))
    wave = owner.form()
    for values in (wave.rows.sessions, wave.rows.sample):
        values.clear()
    owner.back(wave, 10)
    assert owner.rests(1.0)
    assert owner.former.preemptions == 0


def test_room_counts_what_later_waves_take_and_ignores_older_news() -> None:
    room = PathRoom(20)
    assert (room.free, room.room) == (20, 20)
    room.sent(1, 5)
    room.sent(2, 3)
    room.sent(3, -4)
    assert room.free == 16
    room.told(2, 9, 6, 1.0)
    assert (room.free, room.room, room.told_s) == (8, 5, 1.0)
    room.told(1, 12, 12, 2.0)
    assert (room.free, room.told_s) == (13, 1.0)
    room.told(3, UNBOUNDED, UNBOUNDED, 3.0)
    assert room.free == 20
