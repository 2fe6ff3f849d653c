"""What `keystage.bench.tuning` chose, by policy, for the paper experiment to start from.

Before it: a full run of the search (48 trials a policy). After it: `paper_policies`. Values are rounded to
three figures. `effort` is left out: the experiment sets it. To be renewed when a policy, its ranges or the
tuning worlds change.
"""

from __future__ import annotations

from collections.abc import Mapping

CHOSEN: Mapping[str, Mapping[str, str | bool | float]] = {
    "keystage": {"carry_ratio": 0.977, "drain_ratio": 1.22, "estimator.fast_s": 4.04, "gains.kp": 0.0667},
    "infless": {
        "alpha_ratio": 0.392,
        "drain_s": 6.14,
        "keep.gamma_ratio": 0.3,
        "keep.keep_s": 9.24,
        "keep.most_s": 132.0,
        "keep.tail_ratio": 0.977,
        "window_s": 3.54,
    },
    "inferline": {
        "by_envelope": True,
        "first_plan_s": 7.42,
        "least_s": 2.96,
        "recent_s": 60.0,
        "replan_s": 166.0,
        "stable_s": 6.56,
        "utilisation_ratio": 0.605,
    },
    "cocktail": {
        "added_ratio": 0.184,
        "deviations": 0.0315,
        "interval_s": 3.81,
        "order": 1,
        "plans": 10,
        "react_s": 9.41,
        "safety_ratio": 1.28,
        "sample_s": 2.68,
    },
}
