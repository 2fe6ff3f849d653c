"""From the controller's lists of key stages to what KeysManagers shall keep. Pure.

Before it: `PUT /key-stages`, one list per pipeline. After it: every node's `KeyStages`, one list for
all pipelines. Scores compare within one pipeline only, so the lists are dealt in turn: every
pipeline's first, then every second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from keystage.keysmanager.api import StageName
from keystage.local.api import Deployment, role_of

_EMULATED = "emulated"
MAX_DIGITS = 5
"""Of a stage's index; more is a slip, and a range of such would fill the memory."""


def resolve(lists: Mapping[str, Sequence[int]], deployments: Iterable[Deployment]) -> list[StageName]:
    """Names the stages that have parameters, most important first.

    Args:
        lists: key stages by pipeline, most important first.
        deployments: what is deployed; a function that hosts a range has all of its stages.
    """
    homes: dict[tuple[str, int], str] = {}
    for deployment in deployments:
        env = deployment.envVars
        if role_of(deployment) != "stage" or env.get("KEYSTAGE_DEVICE", "").startswith(_EMULATED):
            continue
        for stage in stages_of(env.get("KEYSTAGE_STAGES", "")):
            homes[env.get("KEYSTAGE_PIPELINE", ""), stage] = env.get("KEYSTAGE_BUNDLE", "")
    ranked = [[(name, stage) for stage in stages] for name, stages in sorted(lists.items())]
    dealt = (key for row in zip_longest(*ranked) for key in row if key is not None)
    return [StageName(homes[key], key[1]) for key in dealt if key in homes]


def stages_of(text: str) -> range:
    """Stages of `2` or `0-3`; none where it is neither: the worker itself refuses that by name."""
    first, _, last = text.partition("-")
    if not (
        first.isdecimal() and (not last or last.isdecimal()) and max(len(first), len(last)) <= MAX_DIGITS
    ):
        return range(0)
    return range(int(first), int(last or first) + 1)
