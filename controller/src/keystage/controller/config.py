"""Settings of the controller, read from the environment here and nowhere else in this part."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import msgspec
from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from keystage.controller.policy.settings import PolicySettings
from keystage.kubernetes.config import ClusterSettings
from keystage.kubernetes.cores import quantity
from keystage.kubernetes.manifests import Bundles as PodBundles
from keystage.kubernetes.manifests import Settings as PodSettings
from keystage.openfaas.exchange import Credentials, gateway_address, read_password
from keystage.wire.unreadable import UNREADABLE

MOST_SETTING = 1e9
"""Of any number of the policy, and of seconds to wait: what is beyond it is a mistake, and overflows."""

LEAST_DIVISOR = 1e-6
_DIVISORS = frozenset({"chain_wait_ratio", "fast_s", "forget_s", "slow_s"})
"""Settings by which something is divided."""


class ControllerSettings(ClusterSettings):
    """Environment of `python -m keystage.controller.app`.

    Attributes:
        backend: `kubernetes`: the cluster is steered (`kubernetes.config`, and `pod_*` below); else what
            `control` or `gateway` names.
        control: the supervisor's UNIX socket; this or `gateway`.
        gateway: address of a stock OpenFaaS gateway to steer, in place of a supervisor.
        gateway_user: its user.
        gateway_password_file: file with its password; none for a gateway without basic auth.
        gateway_namespace: namespace of the functions, empty for the gateway's default.
        gateway_timeout_s: bound of one wait for the gateway: it may be busy, and the loop holds meanwhile.
        home: state folder; decisions.jsonl and key-stages.json are kept there.
        lifeline_fd: descriptor whose end of file ends this process.
        tick_s: seconds between observations: a quarter of a second reacts within the start time of
            the fastest replica, and costs about one percent of a core.
        budget_replicas: stage replicas in all (R_total); none by default, the caps of the machine hold.
        stats_timeout_s: bound of one exchange with supervisor or router; two ticks, so that one slow
            router does not delay the others for long.
        decisions_bytes: size from which decisions.jsonl is put aside: some twenty minutes of four stages at
            12 KB a line.
        policy: JSON object of policy settings that differ from their defaults (`PolicySettings`, which
            gives each default's reason, those of the objective included).
        health_port: of probes and metrics on a cluster.
        lease_s: seconds after which another controller takes over from one that is silent; as Kubernetes' own
            leaders have it. One that ends well is followed at once.
        node_pods: pods of every namespace are followed to know what is free on nodes; needs that right.
        beside_vendor_plugin: GPUs are given out also on nodes where another device plugin offers the same
            ones; only right where nobody asks that one for any.
        pod_keysmanager: nodes have a KeysManager with a socket for pods.
        pod_bundles_host_path: folder of every node with bundles; this, or
        pod_bundles_claim: a PersistentVolumeClaim with them; neither: they are fetched from their home.
        pod_bundles_mount_path: where containers, this one included, see them.
        pod_image_pull_policy: of functions' pods, empty: Kubernetes' default.
        pod_image_pull_secrets: names of Secrets, by commas.
        pod_wire_plain: tensors between nodes are sent unencrypted (the network itself encrypts).
        pod_parked: parked pods kept for each pipeline; 2 take what a scale-up of two needs at once.
        pod_cluster_domain: appended to Services' names, empty: the pod's search list completes them.
        pod_requests: requests of stages that state none, `resource=quantity` by commas; without CPU among
            them such a stage's cores cannot be changed in place.
        pod_run_bytes: bound of a pod's memory-backed folder.
        pod_timeout_s: longest that a request may take.
        pod_user: user and group of plain functions, 0: their image's own.
        pod_gpu_runtime_class: runtime class of stages on a GPU, empty: the nodes' default runtime.
        pod_redis_secret: Secret of routers with the address of their Redis, empty: they have none.
        pod_redis_key: of that Secret.
    """

    model_config = SettingsConfigDict(
        env_prefix="KEYSTAGE_", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    control: Path | None = None
    gateway: str = ""
    gateway_user: str = "admin"
    gateway_password_file: Path | None = None
    gateway_namespace: str = ""
    gateway_timeout_s: float = Field(default=5.0, gt=0, le=MOST_SETTING, allow_inf_nan=False)
    home: Path = Path(".keystage")
    lifeline_fd: int | None = None
    tick_s: float = Field(default=0.25, gt=0, le=60, allow_inf_nan=False)
    budget_replicas: int | None = Field(default=None, ge=1)
    stats_timeout_s: float = Field(default=0.5, gt=0, le=MOST_SETTING, allow_inf_nan=False)
    decisions_bytes: int = Field(default=64 << 20, ge=1 << 16)
    policy: str = "{}"
    health_port: int = Field(default=8081, ge=0, le=65535)
    lease_s: int = Field(default=15, ge=3, le=3600)
    node_pods: bool = True
    beside_vendor_plugin: bool = False
    pod_keysmanager: bool = True
    pod_bundles_host_path: str = ""
    pod_bundles_claim: str = ""
    pod_bundles_mount_path: str = "/bundles"
    pod_image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    pod_image_pull_secrets: str = ""
    pod_wire_plain: bool = False
    pod_parked: int = Field(default=2, ge=0, le=1000)
    pod_cluster_domain: str = ""
    pod_requests: str = "cpu=100m,memory=256Mi"
    pod_run_bytes: int = Field(default=1 << 30, ge=1 << 20)
    pod_timeout_s: float = Field(default=600.0, gt=0, le=MOST_SETTING, allow_inf_nan=False)
    pod_user: int = Field(default=12000, ge=0)
    pod_gpu_runtime_class: str = ""
    pod_redis_secret: str = ""
    pod_redis_key: str = "url"

    @field_validator("pod_requests")
    @classmethod
    def _requests_are_quantities(cls, text: str) -> str:
        parse_requests(text)
        return text

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, text: str) -> str:
        parse_policy(text)
        return text

    @model_validator(mode="after")
    def _one_world(self) -> Self:
        if self.backend == "kubernetes":
            self._is_cluster()
            return self
        if (self.control is None) == (not self.gateway):
            given = "both are set" if self.gateway else "neither is"
            raise ValueError(
                "set KEYSTAGE_CONTROL (the socket of `keystage up`) or KEYSTAGE_GATEWAY (a stock OpenFaaS "
                f"gateway), not both: {given}"
            )
        if self.gateway:
            gateway_address(self.gateway)
        return self

    def _is_cluster(self) -> None:
        if self.control is not None or self.gateway:
            raise ValueError("KEYSTAGE_BACKEND=kubernetes goes without KEYSTAGE_CONTROL and KEYSTAGE_GATEWAY")
        if self.pod_bundles_host_path and self.pod_bundles_claim:
            raise ValueError("set KEYSTAGE_POD_BUNDLES_HOST_PATH or KEYSTAGE_POD_BUNDLES_CLAIM, not both")

    @property
    def system_in(self) -> str:
        """The release's namespace."""
        return self.namespace or self.functions_in

    def pod_settings(self) -> PodSettings:
        """What functions' pods are made with."""
        return PodSettings(
            namespace=self.system_in,
            function_namespace=self.functions_in,
            has_keysmanager=self.pod_keysmanager,
            bundles=PodBundles(
                self.pod_bundles_host_path, self.pod_bundles_claim, self.pod_bundles_mount_path
            ),
            image_pull_policy=self.pod_image_pull_policy,
            image_pull_secrets=tuple(filter(None, map(str.strip, self.pod_image_pull_secrets.split(",")))),
            wire_plain=self.pod_wire_plain,
            parked_per_pipeline=self.pod_parked,
            cluster_domain=self.pod_cluster_domain,
            requests=parse_requests(self.pod_requests),
            run_bytes=self.pod_run_bytes,
            timeout_s=self.pod_timeout_s,
            user=self.pod_user,
            gpu_runtime_class=self.pod_gpu_runtime_class,
            redis_secret=self.pod_redis_secret,
            redis_key=self.pod_redis_key,
        )

    def credentials(self) -> Credentials | None:
        """User and password of the gateway, None where it has none.

        Raises:
            ValueError: the file cannot be read or is empty.
        """
        file = self.gateway_password_file
        if file is None:
            return None
        return read_password(self.gateway_user, file)

    def policy_settings(self) -> PolicySettings:
        """The policy's settings."""
        return parse_policy(self.policy)


def parse_requests(text: str) -> tuple[tuple[str, str], ...]:
    """Reads `cpu=100m,memory=256Mi`.

    Raises:
        ValueError: an entry has another form; names it.
    """
    found = []
    for entry in filter(None, map(str.strip, text.split(","))):
        resource, _, amount = entry.partition("=")
        if not resource or quantity(amount) <= 0:
            raise ValueError(f"KEYSTAGE_POD_REQUESTS: {entry!r} is no resource=quantity")
        found.append((resource, amount))
    return tuple(found)


def _check_numbers(where: str, settings: msgspec.Struct) -> None:
    """Refuses what no time, ratio or count can be.

    Raises:
        ValueError: names the setting, the bounds and the number.
    """
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            _check_numbers(f"{where}: {name}", value)
            continue
        least = LEAST_DIVISOR if name in _DIVISORS else 0.0
        if isinstance(value, int | float) and not least <= value <= MOST_SETTING:
            raise ValueError(f"{where}: {name} must be within {least:g} and {MOST_SETTING:g}, got {value}")


def parse_policy(text: str) -> PolicySettings:
    """Reads policy settings from JSON.

    Raises:
        ValueError: not an object of settings; names the field at fault.
    """
    try:
        known = msgspec.json.decode(text, type=dict[str, object])
        unknown = sorted(set(known) - set(PolicySettings.__struct_fields__))
        if unknown:
            raise ValueError(f"KEYSTAGE_POLICY has no setting {', '.join(unknown)}")
        settings = msgspec.convert(known, PolicySettings)
        _check_numbers("KEYSTAGE_POLICY", settings)
        return settings
    except UNREADABLE as error:
        raise ValueError(f"KEYSTAGE_POLICY must be a JSON object of policy settings: {error}") from error
