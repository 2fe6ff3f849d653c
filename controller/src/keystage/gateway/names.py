"""Names as callers write them: functions (`name` or `name.namespace`), namespaces, secrets.

Pure; used by every place that takes a name. There is one namespace, called as OpenFaaS calls it.
"""

from __future__ import annotations

import re

from keystage.gateway.backend import BadRequest, UnknownFunction
from keystage.local.api import MAX_SECRET_NAME, SUBDOMAIN

NAMESPACE = "openfaas-fn"
MAX_NAME = 63
LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(LABEL)
_SECRET = re.compile(SUBDOMAIN)


def function_name(text: str) -> str:
    """The function that a name in a path or body means.

    Raises:
        UnknownFunction: it names another namespace.
    """
    name, dot, namespace = text.rpartition(".")
    if not dot:
        return text
    if namespace != NAMESPACE:
        raise UnknownFunction(f"function {text[:200]} is not deployed: the only namespace is {NAMESPACE}")
    return name


def check_name(name: str) -> None:
    """Refuses what is no function name, by the rule that OpenFaaS has.

    Raises:
        BadRequest: names the rule and the name.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadRequest(
            f"function name {name[:80]!r} must have at most {MAX_NAME} characters and match {_NAME.pattern}"
        )


def check_secret_name(name: str) -> None:
    """Refuses what is no name of a secret.

    Raises:
        BadRequest: names the rule and the name.
    """
    if len(name) > MAX_SECRET_NAME or not _SECRET.fullmatch(name):
        raise BadRequest(
            f"secret name {name[:80]!r} must have at most {MAX_SECRET_NAME} characters and match {SUBDOMAIN}"
        )


def check_namespace(namespace: str) -> None:
    """Refuses every namespace but ours and none.

    Raises:
        BadRequest: names it.
    """
    if namespace not in ("", NAMESPACE):
        raise BadRequest(f"namespace {namespace[:80]!r} does not exist: the only one is {NAMESPACE}")
