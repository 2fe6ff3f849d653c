"""What `keystage bench tuning` chose for the rivals in the paper experiment; Keystage keeps its defaults.

Before it: a full run of the search (48 trials a policy). After it: `paper` and its ablations. Values are
rounded to three figures. To be renewed when a policy, its ranges or the tuning worlds change.
"""

from __future__ import annotations

from collections.abc import Mapping

Chosen = Mapping[str, str | bool | float]

CHOSEN: Mapping[str, Chosen] = {
    "infless": {
        "alpha_ratio": 0.457,
        "drain_s": 4.86,
        "effort": 0.785,
        "keep.gamma_ratio": 0.312,
        "keep.keep_s": 124.0,
        "keep.most_s": 82.6,
        "keep.tail_ratio": 0.808,
        "window_s": 1.74,
    },
    "inferline": {
        "by_envelope": True,
        "effort": 0.876,
        "first_plan_s": 3.42,
        "least_s": 0.613,
        "recent_s": 11.0,
        "replan_s": 109.0,
        "stable_s": 17.4,
        "utilisation_ratio": 0.733,
    },
    "cocktail": {
        "added_ratio": 0.203,
        "deviations": 0.0315,
        "effort": 0.941,
        "interval_s": 3.09,
        "order": 1,
        "plans": 10,
        "react_s": 9.41,
        "safety_ratio": 1.28,
        "sample_s": 2.68,
    },
}


def chosen(policy: str) -> tuple[float, Chosen]:
    """Effort and other settings of a policy; 1 and none for one that nobody tuned."""
    values = dict(CHOSEN.get(policy, {}))
    return float(values.pop("effort", 1.0)), values
