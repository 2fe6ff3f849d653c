"""The simulated world under the platform contract."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from keystage.controller.domain.snapshot import FunctionView
from keystage.controller.domain.snapshot import Override as SeenOverride
from keystage.local.api import Deployment, FunctionRecord, Intent
from keystage.simulator.api import World
from keystage.simulator.platform import SimulatedPlatform


class SimulatedWorld:
    """A simulated world without pipelines; what is deployed is ready at once."""

    has_intents = True

    def __init__(self, _folder: Path) -> None:
        self.platform = SimulatedPlatform(World(pipelines=()), 1, epoch_s=time.time())
        self._deployments: dict[str, Deployment] = {}

    def deploy(self, deployment: Deployment) -> None:
        self._deployments[deployment.service] = deployment
        labels = deployment.labels
        self.platform.deploy(
            FunctionView(
                function=deployment.service,
                min_replicas=int(labels.get("com.openfaas.scale.min", 1)),
                max_replicas=int(labels.get("com.openfaas.scale.max", 20)),
            )
        )

    def intend(self, function: str, intent: Intent) -> None:
        override = None
        if isinstance(intent.override, msgspec.Struct):
            override = SeenOverride(intent.override.replicas, intent.override.expires_at_s)
        self.platform.intend(function, override=override, wake=intent.wake is True)

    def record(self, function: str) -> FunctionRecord:
        return FunctionRecord(
            deployment=self._deployments[function],
            created_at_s=0.0,
            desired=self.platform.desired(function),
        )

    def end(self) -> None:
        self.platform.close()
