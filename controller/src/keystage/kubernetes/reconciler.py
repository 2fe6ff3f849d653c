"""The leader's thread that makes the cluster what was decided, at once, and keeps it so.

Before it: the platform's `Wishes`, and informers. A change of either begins a turn: gather, plan, send. After
it: API server, pods. Calls run in threads and come back as outcomes, so that one that hangs holds up no
other; state belongs to this thread alone. A decision is written into the function's status before it is
acted on; everything else is derived from objects, so a leader may end anywhere and the next one goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from keystage.kubernetes.act import Actor
from keystage.kubernetes.activate import Activator
from keystage.kubernetes.asking import Asking
from keystage.kubernetes.backoff import Backoff
from keystage.kubernetes.client import Object
from keystage.kubernetes.cluster_events import Events
from keystage.kubernetes.expected import Expected
from keystage.kubernetes.gather import Gathered, Gatherer, Objects, ParameterBytes, hold_key
from keystage.kubernetes.intents import Intents
from keystage.kubernetes.jobs import Jobs
from keystage.kubernetes.keysmanagers import KeysManagers
from keystage.kubernetes.manifests import Settings
from keystage.kubernetes.operations import Activate, Apply, Create, Leave, Note, Operation, Park
from keystage.kubernetes.plan import plan
from keystage.kubernetes.pod_starts import PodStarts
from keystage.kubernetes.sending import Sending
from keystage.kubernetes.statuses import Statuses
from keystage.kubernetes.wishes import Wishes
from keystage.kubernetes.world import World

EVERY_S = 1.0
"""A turn at least so often."""
SOON_S = 0.1
"""And so often while something is due by the clock: a pod that leaves, one without a place, a failure."""
BURST_S = 0.005
"""Changes come in bursts: one turn for all of them."""
STOP_S = 5.0
"""For calls to end: what is written after that, another leader may not see in time."""
WORKERS = 16
ACTIVATIONS = 64
REFILL_AFTER_S = 5.0
"""A pool is not filled while its pods become workers: both would be slower. At most for so long."""
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""No vowels: no words come out."""
RequestsOn = Callable[[str, str, float], int | None]
"""Requests that gateways have on a function's replica, told since a moment; None: not all have told."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """What the reconciler needs beside the API server.

    Attributes:
        asking: exchanges with pods.
        requests_on: what gateways have in hand.
        parameter_bytes: sizes of parameters.
        keysmanagers: of the nodes, None: there are none.
        starts: told of each pod of a stage that is made, and of those that became workers.
    """

    asking: Asking
    requests_on: RequestsOn
    parameter_bytes: ParameterBytes
    keysmanagers: KeysManagers | None = None
    starts: PodStarts = dataclasses.field(default_factory=PodStarts)


class Reconciler:
    """The thread.

    Args:
        world: informers, running.
        wishes: what the platform decides.
        settings: of functions' pods.
        links: what else is needed.
        identity: of this controller, for events.
        on_crash: called with a bug that ended the thread; the process is to end too.

    Attributes:
        turned_at_s: `time.monotonic` of the last turn's end, for the health of the process.
    """

    def __init__(
        self,
        world: World,
        wishes: Wishes,
        settings: Settings,
        links: Links,
        *,
        identity: str,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.turned_at_s = self._began_s = time.monotonic()
        self._world = world
        self._wishes = wishes
        self._links = links
        self._on_crash = on_crash
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._pods, self._deployments = Expected(), Expected()
        self._backoff = Backoff()
        self._gatherer = Gatherer(settings, links.parameter_bytes, self._backoff)
        self._jobs = Jobs(WORKERS, "reconciler", self._woken.set)
        self._activations = Jobs(ACTIVATIONS, "activation", self._woken.set)
        self._events = Events(world.cluster, identity)
        actor = Actor(world.cluster, settings)
        self._statuses = Statuses(self._jobs, actor, self._events)
        self._intents = Intents(self._jobs, actor, wishes)
        self._sending = Sending(
            jobs=self._jobs,
            activations=self._activations,
            actor=actor,
            activator=Activator(
                world.cluster,
                links.asking,
                lambda name: world.pods().get(name),
                self._stop,
                links.starts.served,
            ),
            keysmanagers=links.keysmanagers,
            pods=self._pods,
            deployments=self._deployments,
            backoff=self._backoff,
            events=self._events,
            starts=links.starts,
        )
        self._starts = links.starts
        self._told: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begins; only the leader may."""
        self._began_s = time.monotonic()
        self._world.on_change(self._woken.set)
        self._wishes.on_change(self._woken.set)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the present turn and its calls; those that take long end by their own bounds."""
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._jobs.stop(STOP_S)
        self._activations.stop()

    def tell(self, note: Note) -> None:
        """Has something told to people that another part knows; from any thread."""
        self._told.put(note)
        self._woken.set()

    def turn(self) -> bool:
        """Looks at everything once and sends what is to be done.

        Returns:
            Whether something is due by the clock, rather than by a change.
        """
        self._jobs.collect()
        self._activations.collect()
        at_s = self._world.clock.now_s()
        functions = self._world.functions()
        self._wishes.bind({name: obj["metadata"]["uid"] for name, obj in functions.items()})
        self._starts.look(self._world.pods())
        gathered = self._gatherer.gather(self._objects(functions, at_s), self._wishes.read(), at_s)
        for name, known in gathered.functions.items():
            if known.is_redeployed:
                self._wishes.forget(name, cores=True)
        self._intents.turn(gathered)
        settled = self._statuses.turn(gathered, self._sending.trouble())
        scene = dataclasses.replace(
            gathered.scene,
            busy=self._jobs.busy(),
            activating=self._activations.busy(),
            in_use=self._in_use(gathered),
            park_from_s=self._park_from_s(gathered),
        )
        gathered = dataclasses.replace(gathered, scene=scene)
        sent = [
            operation
            for operation in plan(scene, _name)
            if _function_of(operation) in settled or not _function_of(operation)
        ]
        if self._world.functions_age_s() > time.monotonic() - self._began_s:
            # Nothing heard since it leads: what the last one decided may not be known here; none leaves yet.
            sent = [operation for operation in sent if not isinstance(operation, Leave)]
        while not self._told.empty():
            sent.append(self._told.get_nowait())
        if self._sending.send(sent, gathered):
            for name in settled & scene.functions.keys():
                sites = sum(
                    isinstance(op, Create | Activate) and op.function == name and op.uses_site for op in sent
                )
                self._wishes.use_sites(name, sites)
                self._sending.keep(scene.functions[name], gathered)
        self._backoff.keep_only({hold_key(f.name, f.template) for f in scene.functions.values()})
        self.turned_at_s = time.monotonic()
        return self._is_pending(gathered)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._woken.clear()
                is_soon = self.turn()
                if not self._woken.wait(SOON_S if is_soon else EVERY_S):
                    continue
                self._stop.wait(BURST_S)
        except BaseException as error:
            log.exception("the reconciler ended by a bug")
            self._on_crash(error)
            raise

    def _objects(self, functions: Mapping[str, Object], at_s: float) -> Objects:
        # Ages first: what becomes right meanwhile is in the view that is read after.
        pods_s, deployments_s = at_s - self._world.pods_age_s(), at_s - self._world.deployments_age_s()
        return Objects(
            functions=functions,
            pods=self._pods.merge(self._world.pods(), pods_s),
            nodes=self._world.nodes(),
            deployments=self._deployments.merge(self._world.deployments(), deployments_s),
            others=self._world.others(),
        )

    def _in_use(self, gathered: Gathered) -> frozenset[str]:
        """Leaving pods that a gateway has requests on, or may have as far as is known."""
        return frozenset(
            pod.name
            for pod in gathered.scene.pods.values()
            if pod.state == "draining"
            and not pod.is_deleted
            and self._links.requests_on(pod.function, pod.name, pod.leaving_s) != 0
        )

    def _park_from_s(self, gathered: Gathered) -> dict[str, float]:
        held = self._sending.parking_held()
        for pod in gathered.scene.pods.values():
            if pod.is_activating and gathered.scene.at_s - pod.activated_s < REFILL_AFTER_S:
                later_s = pod.activated_s + REFILL_AFTER_S
                held[pod.pipeline] = max(held.get(pod.pipeline, 0.0), later_s)
        return held

    def _is_pending(self, gathered: Gathered) -> bool:
        scene = gathered.scene
        return any(
            (pod.state == "draining" and not pod.is_deleted) or pod.unschedulable_s > 0
            for pod in scene.pods.values()
        ) or any(scene.at_s < f.hold_until_s < scene.at_s + 60.0 for f in scene.functions.values())


def _function_of(operation: Operation) -> str:
    """Whose decision an operation carries out, empty: nobody's."""
    if isinstance(operation, Create | Activate | Apply | Park | Note):
        return operation.function
    return ""


def _name(prefix: str) -> str:
    return f"{prefix}-{''.join(secrets.choice(_LETTERS) for _ in range(5))}"
