"""`python -m keystage.bench.steered`: a rival's policy drives the real local platform, in its own process.

The controller's process runs Keystage's policy alone: no setting names another, and production code must
not import rivals. So a benchmark starts this process beside a `LocalWorld` that has no controller. It meets
the same platform (`LocalPlatform`: the supervisor's socket and the routers' statistics), the same snapshots
and the same tick as the controller, and the rival is the very object that steers simulated worlds. What it
lacks is the log of decisions. A platform that fails is tried again later, as `controller.loop` has it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import msgspec

from keystage.bench.config import BenchSettings
from keystage.bench.paper_policies import STATIC, Traffic, policy
from keystage.controller.domain.platform import Platform, PlatformError
from keystage.controller.domain.steering import Steering
from keystage.controller.loop import FIRST_BACKOFF_S, LAST_BACKOFF_S
from keystage.controller.platforms.local import LocalPlatform
from keystage.wire.endpoints import watch_lifeline

logger = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told, as JSON in its one argument.

    Attributes:
        policy: name, see `paper_policies.policy`.
        effort: the policy's knob.
        changes: settings changed.
        traffic: mean rate and CV by pipeline: `static` alone is told them.
        control: the supervisor's socket.
        home: state folder.
        budget_replicas: R_total, None for no bound.
        tick_s: seconds between observations.
    """

    policy: str
    effort: float = 1.0
    changes: dict[str, str | bool | int | float] = {}  # an integer must stay one through JSON
    traffic: list[Traffic] = []
    control: str = ""
    home: str = ""
    budget_replicas: int | None = None
    tick_s: float = 0.25


def steering(order: Order) -> Steering:
    """The policy of an order, also for the simulator.

    Raises:
        KeyError: there is no such policy.
        AttributeError: it has no such setting.
    """
    changes: dict[str, object] = dict(order.changes)
    if order.policy == STATIC and order.traffic:
        changes["rates_rps"] = {one.pipeline: one.rate_rps for one in order.traffic}
        changes["arrival_scv"] = sum(one.cv**2 for one in order.traffic) / len(order.traffic)
    return policy(order.policy, changes).make(order.effort, Traffic("", 0.0, 1.0))


def drive(platform: Platform, steered: Steering, tick_s: float, stop: threading.Event) -> int:
    """Observes, steers and applies until `stop` is set.

    Returns:
        How often the platform failed.
    """
    failed = in_a_row = 0
    while not stop.is_set():
        began_s = time.monotonic()
        wait_s = tick_s
        try:
            actions = steered.steer(platform.observe())
            for action in actions:
                logger.info("%s", action)
            platform.apply(actions)
            in_a_row = 0
        except PlatformError as error:
            failed, in_a_row = failed + 1, in_a_row + 1
            wait_s = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(10, in_a_row - 1))
            logger.warning("holding the last numbers for %.1f s: %s", wait_s, error)
        stop.wait(max(0.0, began_s + wait_s - time.monotonic()))
    return failed


def main() -> int:
    """Entry of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    order = msgspec.json.decode(sys.argv[1], type=Order)
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    watch_lifeline(BenchSettings().lifeline_fd)
    platform = LocalPlatform(Path(order.control), Path(order.home), budget_replicas=order.budget_replicas)
    try:
        drive(platform, steering(order), order.tick_s, stop)
    finally:
        platform.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
