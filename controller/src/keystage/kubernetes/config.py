"""Settings that the gateway and the controller share where they run on Kubernetes.

The `config.py` of each takes them over by inheritance, and they are read from the environment there. Nothing
here may depend on one of the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

NAMESPACE = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
Namespace = Annotated[str, Field(pattern=f"^({NAMESPACE})?$", max_length=63)]
"""A namespace's name; empty: not given."""


class ClusterSettings(BaseSettings):
    """Where functions are, and how to get there.

    Attributes:
        backend: what runs functions: `local`, the supervisor of `keystage up`, or `kubernetes`.
        namespace: of the release: gateway, controller, KeysManagers, lease.
        function_namespace: of functions, their pods and secrets; empty: the release's.
        kubeconfig: file that says where the API server is; None: we are a pod, else as `kubectl` finds it.
        wire_key_file: the deployment's secret; the token of what gateways, controller, pods and KeysManagers
            ask each other over HTTP is derived from it.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="forbid", frozen=True)

    backend: Literal["local", "kubernetes"] = "local"
    namespace: Namespace = ""
    function_namespace: Namespace = Field(default="", validate_default=True)
    kubeconfig: Path | None = None
    wire_key_file: Path | None = Field(default=None, validate_default=True)

    @field_validator("function_namespace")
    @classmethod
    def _has_namespace(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("backend") == "kubernetes" and not (value or info.data.get("namespace")):
            raise ValueError("KEYSTAGE_BACKEND=kubernetes needs it, or KEYSTAGE_NAMESPACE")
        return value

    @field_validator("wire_key_file")
    @classmethod
    def _has_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if info.data.get("backend") == "kubernetes" and value is None:
            raise ValueError("KEYSTAGE_BACKEND=kubernetes needs it")
        return value

    @property
    def functions_in(self) -> str:
        """The functions' namespace."""
        return self.function_namespace or self.namespace
