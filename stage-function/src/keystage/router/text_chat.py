"""Chat messages to prompt text, by the chat template of the pipeline's tokenizer.

Before it: `router.openai_chat` has validated the messages. After it: the text is tokenised as it
is, for the template itself writes the special tokens. Templates come with models, so they run in
Jinja's immutable sandbox, which here bounds powers and repetition too: those of constants are computed
while a template is compiled. Environment as in transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keystage.bundle.errors import BundleError
from keystage.router.engine import InvalidRequest

_MOST_BASE = 1000
_MOST_REPEATED = 1 << 20
_FAULTS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
"""What a template's own expressions raise: they are the model's, and no fault of the router's."""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("**", "*"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment`; refuses results that would be long."""
        if operator == "**" and max(abs(left), abs(right)) > _MOST_BASE:
            raise SecurityError(f"a power of more than {_MOST_BASE}")
        for one, other in ((left, right), (right, left)):
            if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > _MOST_REPEATED:
                raise SecurityError(f"a text or list of more than {_MOST_REPEATED} elements")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled template.

    Raises:
        BundleError: the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, *_FAULTS) as error:
            raise BundleError(f"the chat template is none: {error}") from error
        self._special = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Prompt text that asks for the assistant's next message.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses the messages: {error.message}", param="messages"
            ) from error
        except _FAULTS as error:
            raise InvalidRequest(
                f"the chat template fails with the messages: {error}", param="messages"
            ) from error
