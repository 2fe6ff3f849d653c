"""The rights that `keystage doctor` asks about are those of the chart's roles, no more and no less."""

from __future__ import annotations

import pytest
from support.helm import NAMESPACE, Object, of_kind, render

from keystage.cli.doctor_rights import CONTROLLER, GATEWAY, Right


def _granted(objects: list[Object], account: str) -> set[tuple[str, str, str, str, str]]:
    """(namespace, group, resource, verb, name) of everything bound to a service account."""
    rules = {
        (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o["rules"]
        for o in of_kind(objects, "Role", "ClusterRole")
    }
    found = set()
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        if account not in {subject["name"] for subject in binding["subjects"]}:
            continue
        namespace = binding["metadata"].get("namespace", "")
        role = binding["roleRef"]
        where = namespace if role["kind"] == "Role" else ""
        for rule in rules[role["kind"], where, role["name"]]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        for name in rule.get("resourceNames", [""]):
                            found.add((namespace, group, resource, verb, name))
    return found


@pytest.mark.parametrize(("account", "rights"), [("gateway", GATEWAY), ("controller", CONTROLLER)])
def test_rights_are_the_chart_s(account: str, rights: tuple[Right, ...]) -> None:
    scopes = {"system": NAMESPACE, "functions": f"{NAMESPACE}-fn", "cluster": ""}
    asked = {(scopes[r.scope], r.group, r.resource, verb, r.name) for r in rights for verb in r.verbs}
    assert asked == _granted(render(), f"keystage-{account}")
