"""The controller as a process: `python -m keystage.controller.app`.

Started and kept running by `keystage up`, on a cluster by its Deployment (`clustered`), or beside a stock
OpenFaaS gateway by whoever runs that. It puts platform, policy and loop together, ends on SIGTERM after the
tick in progress, and at once when its lifeline ends. It must not hold policy.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from keystage.controller.config import ControllerSettings
from keystage.controller.decisions import DecisionLog, replay
from keystage.controller.domain.platform import PlatformError
from keystage.controller.health import HealthServer
from keystage.controller.loop import Loop
from keystage.controller.metrics import Counts
from keystage.controller.platforms.local import LocalPlatform
from keystage.controller.platforms.local_report import SupervisorAudience
from keystage.controller.platforms.openfaas import NotForThisGateway, OpenFaasPlatform
from keystage.controller.seat import Seat
from keystage.controller.telling import Telling
from keystage.kubernetes.errors import ClusterUnavailable
from keystage.openfaas.client import Client
from keystage.openfaas.errors import BadPassword
from keystage.openfaas.exchange import Wire
from keystage.wire.endpoints import EndpointError, watch_lifeline
from keystage.wire.errors import WireError
from keystage.wire.metrics import Sample, expose
from keystage.wire.upkeep import one_heap

logger = logging.getLogger(__name__)


def make_platform(settings: ControllerSettings) -> LocalPlatform | OpenFaasPlatform:
    """The world that is steered.

    Raises:
        BadPassword: the gateway's password file cannot be used.
        NotForThisGateway: the gateway is one of Keystage's own. One that does not answer yet is asked later.
    """
    if settings.control is not None:
        return LocalPlatform(
            settings.control,
            settings.home,
            timeout_s=settings.stats_timeout_s,
            budget_replicas=settings.budget_replicas,
        )
    wire = Wire(settings.gateway, settings.credentials(), settings.gateway_timeout_s)
    platform = OpenFaasPlatform(
        Client(wire, settings.gateway_namespace),
        stats_timeout_s=settings.stats_timeout_s,
        budget_replicas=settings.budget_replicas,
    )
    try:
        platform.recognise()
    except NotForThisGateway:
        platform.close()
        raise
    except PlatformError as error:
        logger.warning("%s", error)
    return platform


def make_telling(settings: ControllerSettings) -> Telling | None:
    """Who hears what it does: the supervisor; None beside a stock gateway, which has no place for reports."""
    if settings.control is None:
        return None
    return Telling(f"controller-{secrets.token_hex(8)}", SupervisorAudience(settings.control))


def seat_of(settings: ControllerSettings) -> Seat:
    """The seat of whoever steers this world: beside the supervisor's socket, whatever the state folder."""
    if settings.control is not None:
        control = settings.control.resolve()
        return Seat(control.with_name(f"{control.name}.controller"))
    return Seat(settings.home / "controller.lock")


@contextlib.contextmanager
def shown(settings: ControllerSettings, counts: Counts, seat: Seat) -> Iterator[None]:
    """Serves probes and metrics meanwhile, where a port is named: nobody needs them on one machine.

    Raises:
        WireError: the port is taken.
    """
    if "health_port" not in settings.model_fields_set:
        yield
        return
    try:
        server = HealthServer(
            settings.health_port,
            lambda: "",
            lambda: "",
            lambda: expose([Sample("keystage_leader", {}, float(seat.is_taken)), *counts.samples()]),
        )
    except OSError as error:
        raise WireError(f"KEYSTAGE_HEALTH_PORT={settings.health_port}: {error.strerror}") from error
    server.start()
    try:
        yield
    finally:
        server.stop()


def run(settings: ControllerSettings, stop: threading.Event | None = None) -> bool:
    """Steers the world until `stop` is set.

    Returns:
        False: it cannot go on, and wants to be started anew.
    """
    stop = stop or threading.Event()
    if settings.backend == "kubernetes":
        from keystage.controller.clustered import run_clustered  # its client takes a second to import

        return run_clustered(settings, stop)
    seat = seat_of(settings)
    platform = make_platform(settings)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = DecisionLog(settings.home / "decisions.jsonl", settings.decisions_bytes)
    telling, counts = make_telling(settings), Counts()
    try:
        with shown(settings, counts, seat):
            if not seat.wait(stop):
                return True
            if telling is not None:
                telling.start()
            loop = Loop(
                platform,
                settings.policy_settings(),
                log,
                tick_s=settings.tick_s,
                telling=telling,
                counts=counts,
            )
            loop.run(stop)
    finally:
        if telling is not None:
            telling.stop()
        platform.close()
        seat.leave()  # last: nothing is written any more
    return True


def replay_decisions(path: Path) -> int:
    """`keystage replay-decisions FILE`: reports every line that differs or is garbled.

    Returns:
        The exit code: 0 when all lines agree, 1 when some do not, 2 when the file cannot be read.
    """
    try:
        count, differences = replay(path)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}\n")
        return 2
    for difference in differences:
        sys.stdout.write(f"{path}:{difference.line}: {difference.text}\n")
    wrong = len({d.line for d in differences})
    sys.stdout.write(f"{count} decisions, {wrong} differ\n")
    return 1 if differences else 0


def main() -> int:
    """Entry of the process."""
    one_heap()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = ControllerSettings()
    except ValidationError as error:
        for fault in error.errors():  # without what was given: an address may hold a password
            name = "".join(f"KEYSTAGE_{part}: ".upper() for part in fault["loc"][:1])
            sys.stderr.write(f"controller: {name}{fault['msg']}\n")
        return 2
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        watch_lifeline(settings.lifeline_fd)
        return 0 if run(settings, stop) else 1
    except (BadPassword, NotForThisGateway, ClusterUnavailable, EndpointError, WireError) as error:
        sys.stderr.write(f"controller: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
