"""Settings of the controller, read from the environment here and nowhere else in this part."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from keystage.controller.policy.settings import PolicySettings
from keystage.openfaas.exchange import Credentials, gateway_address, read_password


class ControllerSettings(BaseSettings):
    """Environment of `python -m keystage.controller.app`.

    Attributes:
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
    """

    model_config = SettingsConfigDict(
        env_prefix="KEYSTAGE_", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    control: Path | None = None
    gateway: str = ""
    gateway_user: str = "admin"
    gateway_password_file: Path | None = None
    gateway_namespace: str = ""
    gateway_timeout_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    home: Path = Path(".keystage")
    lifeline_fd: int | None = None
    tick_s: float = Field(default=0.25, gt=0, le=60, allow_inf_nan=False)
    budget_replicas: int | None = Field(default=None, ge=1)
    stats_timeout_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    decisions_bytes: int = Field(default=64 << 20, ge=1 << 16)
    policy: str = "{}"

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, text: str) -> str:
        parse_policy(text)
        return text

    @model_validator(mode="after")
    def _one_world(self) -> Self:
        if (self.control is None) == (not self.gateway):
            given = "both are set" if self.gateway else "neither is"
            raise ValueError(
                "set KEYSTAGE_CONTROL (the socket of `keystage up`) or KEYSTAGE_GATEWAY (a stock OpenFaaS "
                f"gateway), not both: {given}"
            )
        if self.gateway:
            gateway_address(self.gateway)
        return self

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
        return msgspec.convert(known, PolicySettings)
    except msgspec.DecodeError as error:
        raise ValueError(f"KEYSTAGE_POLICY must be a JSON object of policy settings: {error}") from error
