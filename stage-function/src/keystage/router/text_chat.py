"""Chat messages to prompt text, by the chat template of the pipeline's tokenizer.

Before it: `router.openai_chat` has validated the messages. After it: the text is tokenised as it
is, for the template itself writes the special tokens. Templates come with models, so they run in
Jinja's immutable sandbox, which here bounds powers, repetition and widths too: those of constants are
computed while a template is compiled. Environment as in transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keystage.bundle.errors import BundleError
from keystage.router.engine import InvalidRequest

_MOST_BASE = 1000
_MOST_REPEATED = 1 << 20
_LONG_NUMBER = re.compile(r"\d{7,}")
"""In a format: a width of a million characters and more."""
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


def _refuse_large(*groups: Iterable[Any]) -> None:
    """Raises SecurityError for a number that may be a width or a count, and is too large for one."""
    for value in itertools.chain(*groups):
        if isinstance(value, int) and abs(value) > _MOST_REPEATED:
            raise SecurityError(f"an argument of {str(value)[:20]}, at most {_MOST_REPEATED}")


def _refuse_wide(form: object) -> None:
    """Raises SecurityError for a format with a width of a million characters."""
    if isinstance(form, str) and _LONG_NUMBER.search(form):
        raise SecurityError("a text with a number of 7 digits as a format")


def _narrow(found: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no large numbers, but for the value that is filtered."""
    leading = 2 if hasattr(found, "jinja_pass_arg") else 1

    @functools.wraps(found)
    def narrow(*args: Any, **named: Any) -> Any:
        _refuse_large(args[leading:], named.values())
        return found(*args, **named)

    return narrow


def _format(form: Any, *args: Any, **named: Any) -> str:
    """Jinja's filter, without wide fields."""
    _refuse_wide(form)
    _refuse_large(args, named.values())
    return jinja2.filters.do_format(form, *args, **named)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what makes long texts of short templates: widths, counts and powers.

    A width is given as an argument of a method or filter, in a format, or beside one.
    """

    intercepted_binops = frozenset(("**", "*", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters = {name: _narrow(found) for name, found in self.filters.items()}
        self.filters["format"] = _format

    def call(self, context: jinja2.runtime.Context, called: Any, *args: Any, **named: Any) -> Any:
        """See `SandboxedEnvironment`."""
        _refuse_large(args, named.values())
        if getattr(called, "__name__", "") in ("format", "format_map"):
            method = getattr(called, "__wrapped__", called)  # the sandbox wraps it
            _refuse_wide(getattr(method, "__self__", None))
        return super().call(context, called, *args, **named)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment`; refuses results that would be long."""
        if operator == "%" and isinstance(left, str):
            _refuse_wide(left)
            _refuse_large(right if isinstance(right, tuple) else (right,))
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
        environment.filters["tojson"] = _narrow(_tojson)
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
