"""Which module a worker that hosts several runs next. Pure.

The modules of one worker share its device. Where shares of it are given (`KEYSTAGE_SPUS`), they take turns
by earliest finish time first (NeuStream, section 5; `streams.eftf`): the batch that would have finished
first had the device been split in space. Without shares the module whose first turn has waited longest comes
first: a loop never starves what feeds it.

A worker has one batch in hand (decision 022), so none starts beside another, and the bound of `streams.eftf`
holds but for what is computed when a batch comes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from keystage.streams.eftf import spatial_finish_s


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A batch that a module could run at a worker now.

    Attributes:
        stage: the module.
        arrived_s: when the first of its turns began to wait.
        whole_s: seconds that it takes on the whole device.
    """

    stage: int
    arrived_s: float
    whole_s: float


class DeviceTurns:
    """The order of modules at every worker.

    Args:
        spus: a_i, the share of each module by stage, above 0; empty: none are given.
    """

    def __init__(self, spus: Mapping[int, int]) -> None:
        self._spus = dict(spus)
        self._finish_s: dict[tuple[str, int], float] = {}

    def order(self, worker: str, hosted: Sequence[int], offers: Sequence[Offer]) -> list[Offer]:
        """Offers, the one to be taken first in front.

        Args:
            worker: its address.
            hosted: stages that share the device.
            offers: what could run.
        """
        if not self._spus:
            return sorted(offers, key=lambda offer: (offer.arrived_s, offer.stage))
        return sorted(offers, key=lambda offer: (self._finish(worker, hosted, offer), offer.stage))

    def taken(self, worker: str, hosted: Sequence[int], offer: Offer) -> None:
        """A batch starts: the next of its module follows it in the spatial split too."""
        if self._spus:
            self._finish_s[worker, offer.stage] = self._finish(worker, hosted, offer)

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        for key in [key for key in self._finish_s if key[0] == worker]:
            del self._finish_s[key]

    def _finish(self, worker: str, hosted: Sequence[int], offer: Offer) -> float:
        before_s = self._finish_s.get((worker, offer.stage), -math.inf)
        whole = sum(self._spus[stage] for stage in hosted)
        return spatial_finish_s(offer.arrived_s, before_s, offer.whole_s, self._spus[offer.stage], whole)
