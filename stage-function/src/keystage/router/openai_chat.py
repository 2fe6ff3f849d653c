"""Reads the `messages` of a chat request into what a chat template takes.

Text only: a message is a role and a text. Everything else that a message may hold in OpenAI's
API (tool calls, images, audio, names) is refused by its path, `messages[2].tool_calls`. Pure.
"""

from __future__ import annotations

from typing import Any

from keystage.router.openai_errors import FieldRefused
from keystage.router.openai_values import Reader, shown, wrong_type

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in the API to role in the template; `developer` is the newer name of `system`."""

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
    "required": ["role", "content"],
    "additionalProperties": {"enum": [None, []]},
}
UNREAD = Reader(lambda _name, value: value, {"type": "array", "items": _MESSAGE, "minItems": 1})
"""The field as it came; `read_messages` reads it when the other fields are known to be right."""


def read_messages(value: object) -> list[dict[str, str]]:
    """Validates the messages.

    Args:
        value: the decoded `messages` field.

    Returns:
        `{"role", "content"}` per message, contents joined to one text.

    Raises:
        FieldRefused: names the message and the field at fault.
    """
    if not isinstance(value, list):
        raise wrong_type("messages", "a list of messages", value)
    if not value:
        raise FieldRefused("invalid_value", "messages must hold at least one message", param="messages")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _read_message(path: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong_type(path, "an object", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise FieldRefused(
            "unsupported_value",
            f"{path}.role must be one of {', '.join(_ROLES)}, not {shown(role)}",
            param=f"{path}.role",
        )
    for name, inner in message.items():
        if name not in ("role", "content") and inner is not None and inner != []:
            raise FieldRefused(
                "unsupported_parameter", f"{path}.{name} is not supported", param=f"{path}.{name}"
            )
    return {"role": _ROLES[role], "content": _read_content(f"{path}.content", message.get("content"))}


def _read_content(path: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise FieldRefused("missing_parameter", f"{path} is missing", param=path)
    if not isinstance(content, list):
        raise wrong_type(path, "a string or a list of text parts", content)
    return "".join(_read_part(f"{path}[{i}]", part) for i, part in enumerate(content))


def _read_part(path: str, part: object) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object", part)
    if part.get("type") != "text":
        raise FieldRefused(
            "unsupported_value",
            f"{path}.type is served only as 'text', not {shown(part.get('type'))}",
            param=f"{path}.type",
        )
    extra = next((name for name in part if name not in ("type", "text")), None)
    if extra is not None:
        raise FieldRefused(
            "unsupported_parameter", f"{path}.{extra} is not supported", param=f"{path}.{extra}"
        )
    if not isinstance(part.get("text"), str):
        raise wrong_type(f"{path}.text", "a string", part.get("text"))
    return str(part["text"])
