"""Settings of the policy: plain data with the reason of every default.

Read by `decide` and written with every decision to the log, so that a replay uses the same.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keystage.batching.advice import AdviceSettings
from keystage.controller.maths.estimator import EstimatorSettings
from keystage.controller.maths.pid import PidGains


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the corrector, the damping and the ranking behave.

    Attributes:
        estimator: windows and priors.
        gains: of the PID trim.
        start_s: seconds a replica takes to get ready until one was measured.
        drain_ratio: a backlog shall be gone within this part of the deadline once new replicas are ready:
            then most of what waits still arrives in time. Less reacts to bursts that the present ones
            survive (in simulation 0.3 uses a tenth more replicas for the same latency per replica).
        chain_wait_ratio: part of a pipeline's slack (deadline less service) that waiting for bursts may
            take on average: waits in heavy traffic are exponential, so a mean of a third of the slack
            keeps 95 % of them within it.
        most_stage_scv: squared CV of arrivals a single stage is sized for; more of it is a matter of the
            whole chain (`demand.pipeline_rps`).
        drain_start_ratio: ... but not faster than this many start times: a replica that takes 45 s
            to start is no answer to a burst of one second.
        drain_s: ... and never faster than this (a few ticks: sampling noise is not a burst).
        hold_s: fewer replicas must have sufficed for this long before one is given back; at CV 4 the
            next burst comes within seconds, and finding the replicas there is worth more than they cost.
        hold_start_ratio: ... or for this many start times, whichever is longer: what is slow to
            get is given back slowly.
        hold_next_ratio: ... and the next ones after this part of it, for then the load is known to be low.
        carry_ratio: a replica is given back only if the rest stays below this utilisation.
        carry_nepers: ... and only if chance brings the queue that would ask for it again less often than
            once in e^this looks: 160,000 looks are half a day. At 7 (five minutes) one stage in a
            hundred went 1, 2, 1 within 80 s of Poisson arrivals; at 12 none of a thousand does, and a world
            with start times of seconds holds as many GPUs.
        busy_ratio: workers busier than this are compute-bound (looping): slots would not help.
        wait_ttft_ratio: part of the TTFT objective a session may wait for a slot; the rest is for
            its prefill.
        ttft_s: TTFT where the pipeline states none: people notice answers later than this.
        deadline_service_ratio: deadline in service times where the pipeline states none.
        least_wait_ratio: a share without room for waiting still allows waits of this many service
            times; less would ask for endless replicas.
        rank_ratio: an order of key stages is replaced when a later stage exceeds an earlier one by
            this factor (estimates of equal stages swap at every tick otherwise).
        forget_s: time constant in which the trim's integral, and what a new leader found, fade.
        feedback: whether the PID trim corrects the model (off: an ablation).
        smoothing: which predictor of arrival variation the smoother uses, or `off`.
        compensation: whether CPU cores are given before a replica where that is known to help.
        spread: whether replicas are placed by KL divergence (off: first node with room, an ablation).
        effort: factor on the demand of every stage. 1 is the policy; experiments that compare
            steerings at equal GPU-seconds vary it.
        idle_s: a pipeline goes to zero, where its labels allow it, when nothing came for this long: several
            times what a person pauses between two requests.
        load_s: time constant of a plain function's rate of requests: gateways report once a second, so one
            report moves it by a fifth at most.
        look_s: a pipeline that shows nothing new and holds a surplus is looked at again after this long at
            the latest: as often as replicas are given back.
        rest_s: one that holds none, after this long: its rates fade over a minute, so little is lost.
        settle_s: after an action took effect the trim stays frozen for this long, so that queues of
            before are not held against the new number.
        advice: thresholds and intervals of Symphony's autoscaling advice (deferred batching only).
    """

    estimator: EstimatorSettings = EstimatorSettings()
    gains: PidGains = PidGains()
    start_s: float = 2.0
    drain_ratio: float = 0.6
    chain_wait_ratio: float = 1 / 3
    most_stage_scv: float = 1.0
    drain_start_ratio: float = 0.25
    drain_s: float = 0.2
    hold_s: float = 8.0
    hold_start_ratio: float = 2.0
    hold_next_ratio: float = 0.25
    carry_ratio: float = 0.9
    carry_nepers: float = 12.0
    busy_ratio: float = 0.85
    wait_ttft_ratio: float = 0.5
    ttft_s: float = 2.0
    deadline_service_ratio: float = 10.0
    least_wait_ratio: float = 0.1
    rank_ratio: float = 1.2
    forget_s: float = 30.0
    settle_s: float = 1.0
    idle_s: float = 300.0
    load_s: float = 5.0
    look_s: float = 2.0
    rest_s: float = 5.0
    feedback: bool = True
    smoothing: Literal["off", "qna", "attention"] = "qna"
    compensation: bool = True
    spread: bool = True
    effort: float = 1.0
    advice: AdviceSettings = AdviceSettings()


MOST_REPLICAS = 1000
"""No function gets more, whatever labels say: a mistyped label must not fill a cluster."""
