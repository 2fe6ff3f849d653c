"""What a pipeline says about its batches, and which deadline counts for whom. Pure.

Before it: `config` reads the settings. After it: `single` and `binding` act on them. docs/batching.md
explains them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keystage.batching.choice import EAGER, BatchingChoice, Late
from keystage.batching.stage_policy import PATIENCE_S

MOST_PLANNED_S = 60.0
"""A deadline further away is none to plan by: whoever gives an hour does not want to be held for an hour."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSettings:
    """Batching of one single-pass pipeline.

    Attributes:
        batching: when batches start.
        late: what becomes of requests that cannot meet their deadline.
        objective_s: the pipeline's own objective for a whole request, None for none.
        spus: shares of a device by module, for a stream program whose modules share workers; empty: none.
        ttft_s: the objective for the first token of a looping pipeline's request, None for none.
        tpot_s: the same for the time per token after the first.
    """

    batching: BatchingChoice = EAGER
    late: Late = "demote"
    objective_s: float | None = None
    spus: tuple[tuple[str, int], ...] = ()
    ttft_s: float | None = None
    tpot_s: float | None = None

    def shares(self, modules: Sequence[str]) -> dict[int, int]:
        """`spus` by place of the module, empty where none are given.

        Raises:
            ValueError: a name that is no module, or a module without a share.
        """
        given = dict(self.spus)
        unknown, missing = given.keys() - set(modules), set(modules) - given.keys()
        if given and (unknown or missing):
            wrong = f"names {min(unknown)!r}" if unknown else f"gives {min(missing)!r} no share"
            raise ValueError(f"KEYSTAGE_SPUS {wrong}; the modules are {', '.join(modules)}")
        return {place: given[name] for place, name in enumerate(modules)} if given else {}

    def due_s(self, arrived_s: float, deadline_s: float | None) -> float:
        """When a request should be answered: its own deadline, else the pipeline's objective, else never."""
        limit_s = deadline_s if deadline_s is not None else self.objective_s
        return math.inf if limit_s is None else arrived_s + limit_s

    def is_met(
        self,
        taken_s: float,
        deadline_s: float | None,
        first_s: float | None = None,
        token_s: float | None = None,
    ) -> bool | None:
        """Whether an answer met what was asked of it: its request's own deadline, else the whole objective.

        Args:
            taken_s: seconds from admission to the end of the answer, infinite where there was none.
            deadline_s: the request's own, None: it states none.
            first_s: seconds to the first token, infinite where none came; None: no tokens are streamed.
            token_s: seconds per token after the first, None: there was one token at most.

        Returns:
            None: nothing was asked of it.
        """
        if deadline_s is not None:
            return taken_s <= deadline_s
        pairs = ((taken_s, self.objective_s), (first_s, self.ttft_s), (token_s, self.tpot_s))
        bounds = [(value, bound) for value, bound in pairs if bound is not None]
        return all(value is None or value <= bound for value, bound in bounds) if bounds else None

    def plans_for(self, due_s: float, arrived_s: float) -> bool:
        """Whether batches are planned so that a request that came at `arrived_s` is answered by `due_s`.

        Eager batching plans nothing: what comes first is served first.
        """
        return due_s - arrived_s <= MOST_PLANNED_S and self.batching.policy != "eager"

    def limit_s(self, arrived_s: float, deadline_s: float, due_s: float) -> float:
        """Seconds from its arrival within which an answer is of use: later ones are refused."""
        return (min(deadline_s, due_s) if self.late == "refuse" else deadline_s) - arrived_s

    def order_s(self, due_s: float, arrived_s: float) -> float:
        """Time by which a request has its place before batches are made of those that wait."""
        return due_s if self.plans_for(due_s, arrived_s) else arrived_s + PATIENCE_S
