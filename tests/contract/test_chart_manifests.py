"""`manifests/` is what the chart renders to, and holds no secret."""

from __future__ import annotations

import yaml
from support.manifests import FOLDER, manifests


def test_manifests_are_current() -> None:
    made = manifests()
    there = {file.name: file.read_text() for file in FOLDER.glob("*.yaml")}
    assert sorted(there) == sorted(made), "run `make manifests`"
    changed = [name for name, text in made.items() if there[name] != text]
    assert not changed, f"run `make manifests`: {changed}"


def test_manifests_hold_no_secret() -> None:
    kinds = [
        one["kind"] for file in FOLDER.glob("*.yaml") for one in yaml.safe_load_all(file.read_text()) if one
    ]
    assert "Secret" not in kinds
    assert {"Deployment", "DaemonSet", "CustomResourceDefinition", "Namespace"} <= set(kinds)


def test_namespaces_come_before_what_lies_in_them() -> None:
    """`kubectl apply -f manifests/` takes the files by name."""
    order = sorted(file.name for file in FOLDER.glob("*.yaml"))
    for name in order:
        for one in yaml.safe_load_all((FOLDER / name).read_text()):
            if one and one["metadata"].get("namespace") == "keystage-fn":
                assert order.index("namespace.yaml") < order.index(name), name
