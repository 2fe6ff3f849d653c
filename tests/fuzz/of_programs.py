"""Targets that are whole programs: their environment is hostile, they start, or say why not (`forking`)."""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fuzz.forking import Forked, Refused
from fuzz.mutate import TEXT_NUMBERS, TEXTS, of_text
from fuzz.target import Ready

_SYSTEM = ("PATH", "LANG", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")


VALUES = (
    "fd://9", "127.0.0.1:1", "ipc:///nowhere/x", "tcp://127.0.0.1:0", "/dev/null", "/proc/self/mem",
    "/nowhere/a/b",
    "file:///nowhere", "http://127.0.0.1:9/b", "on", "off", "true", "0-1", "1-0", "cuda:9", "cpu", "-5",
    "99", "redis://x",
    "kubernetes", "local", "\udcff", "a" * 300, "a=1,a=2", "{}", "timeout:1e999",
)  # fmt: skip


def _base(scratch: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _SYSTEM if name in os.environ}
    return {**kept, "HOME": str(scratch), "OMP_NUM_THREADS": "1", **more}


def _bundle(scratch: Path) -> str:
    from keystage.bundle.api import emulated
    from keystage.bundle.store import write

    folder = scratch / "bundle"
    folder.mkdir(exist_ok=True)
    write(folder, emulated("p", 2, execution="looping"))
    return str(folder)


def _names(config: type) -> Iterable[str]:
    """The variables that a settings class reads."""
    fields: Mapping[str, Any] = config.model_fields  # type: ignore[attr-defined]
    for name, field in fields.items():
        alias = field.validation_alias
        yield alias if isinstance(alias, str) else f"KEYSTAGE_{name.upper()}"


def _program(
    scratch: Path,
    module: str,
    configs: Iterable[type],
    good: Mapping[str, str],
    up: str,
    lives_s: float = 1.0,
) -> Ready:
    main: Callable[[], int] = importlib.import_module(module).main
    forked = Forked(main, scratch, _base(scratch, **good), up, lives_s)
    names = [name for config in configs for name in _names(config)]
    return Ready(forked.run, (Refused,), (b"{}",), _change(names, good))


def _change(names: Sequence[str], good: Mapping[str, str]) -> Callable[[bytes, random.Random], bytes]:
    """One to three variables with another value, of a good one's kind or of any."""

    def change(data: bytes, rng: random.Random) -> bytes:
        given: dict[str, str] = {}
        for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2, 3)))):
            value = rng.choice(
                (
                    rng.choice(VALUES),
                    rng.choice(TEXTS),
                    rng.choice(TEXT_NUMBERS).decode(),
                    rng.choice(TEXT_NUMBERS).decode(),
                )
            )
            if name in good and rng.random() < 0.5:
                value = of_text(good[name].encode(), rng, VALUES).decode("utf-8", "replace")
            given[name] = value
        return json.dumps(given).encode()

    return change


def router(scratch: Path) -> Ready:
    """`python -m keystage.router.app`."""
    from keystage.router.config import RouterConfig
    from keystage.wire.config import TraceConfig, WireConfig

    good = {
        "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": _bundle(scratch), "KEYSTAGE_ROUTER": f"ipc://{scratch}/r",
    }  # fmt: skip
    return _program(scratch, "keystage.router.app", (RouterConfig, WireConfig, TraceConfig), good, "is up")


def worker(scratch: Path) -> Ready:
    """`python -m keystage.worker.app`."""
    from keystage.wire.config import WireConfig
    from keystage.worker.config import WorkerConfig

    good = {
        "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": _bundle(scratch), "KEYSTAGE_ROUTER": f"ipc://{scratch}/r",
        "KEYSTAGE_STAGES": "0-1", "KEYSTAGE_REPLICA": "w", "KEYSTAGE_RUN": str(scratch),
        "KEYSTAGE_DEVICE": "emulated",
    }  # fmt: skip
    return _program(scratch, "keystage.worker.app", (WorkerConfig, WireConfig), good, "is ready")


def gateway(scratch: Path) -> Ready:
    """`python -m keystage.gateway.app`."""
    from keystage.gateway.config import GatewaySettings
    from keystage.wire.config import TraceConfig

    for name in ("basic-auth-user", "basic-auth-password"):
        (scratch / name).write_text("a")
    good = {
        "KEYSTAGE_CREDENTIALS": str(scratch), "KEYSTAGE_CONTROL": str(scratch / "up.sock"),
        "KEYSTAGE_HTTP": "127.0.0.1:0",
    }  # fmt: skip
    return _program(scratch, "keystage.gateway.app", (GatewaySettings, TraceConfig), good, "no word")


def controller(scratch: Path) -> Ready:
    """`python -m keystage.controller.app`."""
    from keystage.controller.config import ControllerSettings

    good = {"KEYSTAGE_CONTROL": str(scratch / "up.sock"), "KEYSTAGE_HOME": str(scratch)}
    return _program(scratch, "keystage.controller.app", (ControllerSettings,), good, "no word")


def keysmanager(scratch: Path) -> Ready:
    """`python -m keystage.keysmanager.app`, and the program of a pod."""
    from keystage.keysmanager.config import KeysManagerConfig

    good = {
        "KEYSTAGE_KEYSMANAGER": str(scratch / "k.sock"),
        "KEYSTAGE_KEYSMANAGER_STATE": str(scratch / "state"),
    }
    return _program(scratch, "keystage.keysmanager.app", (KeysManagerConfig,), good, "no word")


def device_plugin(scratch: Path) -> Ready:
    """`python -m keystage.keysmanager.device_plugin`."""
    from keystage.keysmanager.device_plugin_config import DevicePluginConfig

    good = {"KEYSTAGE_EMULATED_GPUS": "2x80", "KEYSTAGE_DEVICE_PLUGINS": str(scratch)}
    return _program(scratch, "keystage.keysmanager.device_plugin", (DevicePluginConfig,), good, "no word")


def pod(scratch: Path) -> Ready:
    """`python -m keystage.keysmanager.pod`."""
    from keystage.keysmanager.pod_config import PodConfig

    good = {
        "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": _bundle(scratch), "KEYSTAGE_ROUTER": f"ipc://{scratch}/r",
        "KEYSTAGE_STAGES": "0", "KEYSTAGE_REPLICA": "w", "KEYSTAGE_RUN": str(scratch),
        "KEYSTAGE_DEVICE": "emulated",
    }  # fmt: skip
    return _program(scratch, "keystage.keysmanager.pod", (PodConfig,), good, "is ready")


def supervisor(scratch: Path) -> Ready:
    """`keystage up`."""
    import sys

    from keystage.cli.main import main
    from keystage.local.config import LocalSettings

    def up() -> int:
        sys.argv = ["keystage", "up"]
        code = main()
        return code if isinstance(code, int) else 0

    good = {
        "KEYSTAGE_HOME": str(scratch / "home"),
        "KEYSTAGE_GATEWAY_PORT": "0",
        "KEYSTAGE_KEYSMANAGER_OFF": "1",
    }
    forked = Forked(up, scratch, _base(scratch, **good), "gateway", 2.0)
    return Ready(forked.run, (Refused,), (b"{}",), _change(list(_names(LocalSettings)), good))


def bundles(scratch: Path) -> Ready:
    """A router with a hostile `pipeline.json`: the input is the file."""
    from keystage.bundle.api import emulated
    from keystage.router.app import main

    folder = Path(_bundle(scratch))
    base = _base(
        scratch, KEYSTAGE_PIPELINE="p", KEYSTAGE_BUNDLE=str(folder), KEYSTAGE_ROUTER=f"ipc://{scratch}/r"
    )
    forked = Forked(main, scratch, base, "is up", 0.8)

    def run(data: bytes) -> None:
        (folder / "pipeline.json").write_bytes(data)
        forked.run(b"{}")

    seeds = (
        msgspec.json.encode(emulated("p", 2, execution="looping")),
        msgspec.json.encode(emulated("p", 2, execution="single-pass")),
    )
    return Ready(run, (Refused,), seeds)
