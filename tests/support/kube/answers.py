"""What a Kubernetes API server says when it refuses: exceptions that carry the `Status` body of the real one.

Raised anywhere below the HTTP face, which turns them into bodies. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """One reason in `details.causes`."""

    reason: str
    message: str
    field: str

    def line(self) -> str:
        """As it stands in the message."""
        return f"{self.field}: {self.message}"


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def body(self) -> Object:
        """The `Status` object."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def _qualified(group: str, name: str) -> str:
    return f"{name}.{group}" if group else name


def _details(group: str, kind: str, name: str) -> Object:
    details: Object = {"kind": kind}
    if name:
        details["name"] = name
    if group:
        details["group"] = group
    return details


def not_found(group: str, plural: str, name: str) -> Refused:
    """404: no such object."""
    text = f'{_qualified(group, plural)} "{name}" not found'
    return Refused(404, "NotFound", text, _details(group, plural, name))


def no_resource() -> Refused:
    """404: no such path."""
    return Refused(404, "NotFound", "the server could not find the requested resource", {})


def exists(group: str, plural: str, name: str) -> Refused:
    """409: the name is taken."""
    text = f'{_qualified(group, plural)} "{name}" already exists'
    return Refused(409, "AlreadyExists", text, _details(group, plural, name))


def modified(group: str, plural: str, name: str) -> Refused:
    """409: the resource version given is not the present one."""
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(group, plural, name, why)


def conflict(group: str, plural: str, name: str, why: str) -> Refused:
    """409: for that reason."""
    text = f'Operation cannot be fulfilled on {_qualified(group, plural)} "{name}": {why}'
    return Refused(409, "Conflict", text, _details(group, plural, name))


def apply_conflict(causes: list[Cause]) -> Refused:
    """409: other managers own fields that were applied."""
    count = f"{len(causes)} conflict" + ("s" if len(causes) > 1 else "")
    by_manager: dict[str, list[str]] = {}
    for cause in causes:
        by_manager.setdefault(cause.message, []).append(cause.field)
    if len(causes) == 1:
        lines = f"{causes[0].message}: {causes[0].field}"
    else:
        lines = "\n".join(
            f"{message}:\n" + "\n".join(f"- {field}" for field in fields)
            for message, fields in by_manager.items()
        )
    details = {"causes": [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]}
    return Refused(409, "Conflict", f"Apply failed with {count}: {lines}", details)


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> Refused:
    """422: the object breaks rules."""
    lines = [cause.line() for cause in causes]
    listed = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    text = f'{_qualified(group, kind)} "{name}" is invalid: {listed}'
    details = _details(group, kind, name)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    return Refused(422, "Invalid", text, details)


def bad_request(message: str) -> Refused:
    """400."""
    return Refused(400, "BadRequest", message)


def forbidden(group: str, plural: str, name: str, why: str) -> Refused:
    """403."""
    what = f'{_qualified(group, plural)} "{name}"' if name else _qualified(group, plural)
    return Refused(403, "Forbidden", f"{what} is forbidden: {why}", _details(group, plural, name))


def unauthorized() -> Refused:
    """401: a token that nobody has."""
    return Refused(401, "Unauthorized", "Unauthorized")


def expired(version: str, floor: int) -> Refused:
    """410: that version is no longer kept."""
    return Refused(410, "Expired", f"too old resource version: {version} ({floor})")


def unsupported(content: str) -> Refused:
    """415: a patch of a kind that this resource does not take."""
    text = (
        "the body of the request was in an unknown format - accepted media types include: "
        "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
        f" (got {content})"
    )
    return Refused(415, "UnsupportedMediaType", text)


def method_not_allowed() -> Refused:
    """405."""
    return Refused(
        405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {}
    )


def success(details: Object) -> Object:
    """Body of a deletion that is done."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
