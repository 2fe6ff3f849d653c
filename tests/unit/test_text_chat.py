"""Chat templates: rendered as transformers does, and without reach beyond the sandbox."""

from __future__ import annotations

import datetime as dt

import pytest

from keystage.bundle.errors import BundleError
from keystage.router.engine import InvalidRequest
from keystage.router.text_chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "<hi> & 'bye'"}]


def test_blocks_are_trimmed_and_special_tokens_known() -> None:
    source = """{{ bos_token }}
    {% for m in messages %}
[{{ m['role'] }}] {{ m.content }}
    {% if loop.last %}{% break %}{% endif %}
    {% endfor %}
{% if add_generation_prompt %}GO{% endif %}"""
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == "<s>\n[user] <hi> & 'bye'\nGO"


def test_json_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages[0].content | tojson }}", {}).render(MESSAGES) == "\"<hi> & 'bye'\""


def test_template_refuses_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.param == "messages"


def test_date_of_today() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)
    assert year in {str(dt.datetime.now().astimezone().year), str(dt.datetime.now().astimezone().year - 1)}


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__['os'] }}"],
)
def test_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].role.ljust(n) }}", "{{ messages[0].role | center(n) }}",
        "{{ messages | tojson(indent=n) }}", "{{ messages[0].role | indent(width=n) }}",
        "{{ '%*d' % (n, 1) }}", "{{ ('%' ~ n ~ 'd') % 1 }}", "{{ ('%' ~ n ~ 'd') | format(1) }}",
        "{{ ('{:' ~ n ~ '}').format(1) }}", "{{ '{:{w}}'.format(1, w=n) }}", "{{ messages | batch(n, 'x') }}",
        "{{ messages | slice(n) }}", "{{ lipsum(9) }}", "{{ messages[0].role * n }}",
    ],
)  # fmt: skip
def test_short_templates_make_no_long_texts(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{% set n = 2000000000 %}" + source, {}).render(MESSAGES)


def test_long_numbers_in_messages_are_texts_like_any_other() -> None:
    source = (
        "{{ messages[0].content.strip() }} {{ messages[0].content | trim | int }} {{ '%5d|%s' % (7, 'a') }} "
        "{{ '{:>4}'.format(1) }} {{ [3, 4] | tojson(indent=1) | replace('\\n', '') }}"
    )
    messages = [{"role": "user", "content": " 12345678901 "}]
    made = ChatTemplate(source, {}).render(messages)
    assert made == "12345678901 12345678901     7|a    1 [ 3, 4]"


def test_broken_template_is_refused_when_loaded() -> None:
    with pytest.raises(BundleError, match="template"):
        ChatTemplate("{% for %}", {})
