"""Chat messages to prompt text, by the chat template of the pipeline's tokenizer.

Before it: `router.openai_chat` has validated the messages. After it: the text is tokenised as it
is, for the template itself writes the special tokens. Templates come with models, so they run in
Jinja's immutable sandbox. Environment as in transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keystage.router.engine import InvalidRequest


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A compiled template.

    Raises:
        jinja2.TemplateSyntaxError: the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
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
