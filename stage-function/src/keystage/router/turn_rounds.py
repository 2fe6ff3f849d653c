"""The next batch of a module that requests pass many times and by a deadline. Pure.

Called by `turn_batches` where it is known how often each request will still pass the module
(`StreamModule.visits_left`). What a round may take is, for each request, the time that is left over the
rounds that are left. It takes the service of a batch, times what other modules on the worker add to that.

1. Who cannot end even alone is given up.
2. Who has begun the loop goes on, all in one batch, as long as that is quick enough for each. If it is too
   slow for the tightest, that one gets smaller batches while the others can spare the rounds; else it is
   given up: carrying it on would make all late.
3. Newcomers fill up the batch while it stays quick enough for all in it. One that could not even begin alone
   is given up; until then it waits, since who leaves the loop may make room (decision 029).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keystage.batching.profile import LatencyProfile
from keystage.router.turns import Turn


@dataclasses.dataclass(frozen=True, slots=True)
class Rounds:
    """What rounds of a module take, and what is left for them.

    Attributes:
        profile: of the module.
        pace_ratio: what a round takes over the service of its batch, at least 1.
        now_s: the present.
        after_s: what follows the loop.
    """

    profile: LatencyProfile
    pace_ratio: float
    now_s: float
    after_s: float

    def seconds(self, batch: int) -> float:
        """Of a round of so many."""
        return self.pace_ratio * self.profile.latency_s(batch)

    def fits(self, share_s: float) -> int:
        """The largest batch whose rounds take no longer, at least 1."""
        return max(1, self.profile.largest_batch(share_s / self.pace_ratio))

    def left_s(self, turn: Turn) -> float:
        """Until the request must have left the loop."""
        return turn.call.due_s - self.after_s - self.now_s

    def share_s(self, turn: Turn) -> float:
        """What a round may take."""
        return self.left_s(turn) / turn.visits

    def next_batch(self, turns: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
        """The turns of the next batch, and those that are given up.

        Args:
            turns: what waits, each with `visits` and a due time; those that are late already among them.
        """
        in_time = [turn for turn in turns if not turn.is_late]
        if not in_time:
            return list(turns[:1]), []
        hopeless = [turn for turn in in_time if self.share_s(turn) < self.profile.latency_s(1)]
        begun = [turn for turn in in_time if turn.has_begun and turn not in hopeless]
        newcomers = [turn for turn in in_time if not turn.has_begun and turn not in hopeless]
        batch, is_whole, given_up = self._going_on(begun)
        if is_whole:
            given_up += self._fill(batch, newcomers)
        return batch, hopeless + given_up

    def _going_on(self, begun: Sequence[Turn]) -> tuple[list[Turn], bool, list[Turn]]:
        """Those of the loop that go on now, whether that is all of them, and who is given up."""
        batch = sorted(begun, key=self.share_s, reverse=True)[: self.profile.most]
        given_up: list[Turn] = []
        while batch and self.seconds(len(batch)) > self.share_s(batch[-1]):
            tightest, others = batch[-1], batch[:-1]
            fits = self.fits(self.share_s(tightest))
            rest_s = self.seconds(max(1, len(others)))
            spare_s = min((self.left_s(turn) - turn.visits * rest_s for turn in others), default=0.0)
            if spare_s >= tightest.visits * self.seconds(fits):
                return batch[-fits:], False, given_up  # those that have least to spare go with it
            given_up.append(batch.pop())
        return batch, True, given_up

    def _fill(self, batch: list[Turn], newcomers: Sequence[Turn]) -> list[Turn]:
        """Adds newcomers to a batch; returns those that are given up."""
        given_up: list[Turn] = []
        tight_s = self.share_s(batch[-1]) if batch else math.inf
        for turn in sorted(newcomers, key=lambda turn: (turn.call.due_s, turn.number)):
            least_s = min(tight_s, self.share_s(turn))
            if self.share_s(turn) < self.seconds(1):
                given_up.append(turn)
            elif len(batch) < self.profile.most and self.seconds(len(batch) + 1) <= least_s:
                batch.append(turn)
                tight_s = least_s
        return given_up
