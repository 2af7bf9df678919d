"""Chat templates by jinja2 alone, against transformers' own rendering of the same."""

import subprocess
import sys
from itertools import product
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.compatibility.vllm_folders import OTHER_TEMPLATE
from tests.models.vision_families import QWEN_TEMPLATE
from tests.rendering.chat.chat_folders import CHATML, HEADERS, PARTS, TURNS
from trio_pool_serve.rendering.chat.template_sandbox import render_conversation

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson(indent=2) }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 > ns.last_query_index and message.role == 'user' %}{%- continue %}{%- endif %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if documents %}{% for d in documents %}{{ d.title }}: {{ d.text | e }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

SHAPES = """
    {# a comment #}
    {% for key, value in dict(a=1, b='<x>').items() %}
    {{ key }}={{ value | tojson }}{{ dict.fromkeys([key]) }}
    {% if loop.index == 9 %}{% break %}{% endif %}
    {% endfor %}
{{ strftime_now('%Y') | length }} {{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}
{% generation %}{% set said = 'set' %}{{ said }}{{ eos_token }}{% endgeneration -%}{{ said }}
{{ tools }} {{ documents }} {{ undefined_one }} {{ 'ä<&>' | tojson }}
"""

REFUSED = {
    "mutation": "{{ messages.append(1) }}",
    "internals": "{{ ''.__class__.__mro__ }}",
    "a class's attributes": "{{ dict.mro() }}",
    "underscored names": "{% set ns = namespace(__html__=1) %}",
    "underscored names later": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "a long range": "{% for i in range(9999999) %}{% endfor %}",
    "an undefined object's field": "{{ missing.field }}",
    "its own error": "{{ raise_exception('roles must alternate') }}",
}

TEMPLATES = {
    "chatml": CHATML, "headers": HEADERS, "turns": TURNS, "parts": PARTS, "qwen_vl": QWEN_TEMPLATE,
    "roles": OTHER_TEMPLATE, "qwen3": QWEN3, "shapes": SHAPES,
    "stripped": "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
    "upper": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    **REFUSED,
}  # fmt: skip

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None, True, "<é>"]}}}


def said(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


PART = {"type": "text", "text": "in parts "}
CONVERSATIONS = {
    "one": said("hello <b> & 'ü'"),
    "open": said("  a ", " and b  "),
    "system": [{"role": "system", "content": "be brief"}, *said("a", "b", "c")],
    "parts": said([PART, {"type": "image"}], [PART, PART, {"type": "image"}]),
    "no text": said([{"type": "image"}]),
    "two users": [*said("a"), *said("b")],
    "empty": [],
}

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompted": {"add_generation_prompt": True, "enable_thinking": False},
    "continued": {"continue_final_message": True},
    "tools": {"tools": [TOOL], "documents": [{"title": "t", "text": "<d>"}]},
    "odd tools": {"tools": ["f"]},
    "odd documents": {"documents": "text"},
    "reserved": {"self": 1},
}


def outcome(render: Any, template: str, messages: Any, given: dict[str, Any]) -> str | type[Exception]:
    try:
        return render(template, messages, **given)
    except Exception:
        return Exception


def theirs(template: str, messages: Any, **given: Any) -> str:
    return render_jinja_template([messages], chat_template=template, **SPECIAL, **given)[0][0]


def ours(template: str, messages: Any, **given: Any) -> str:
    flags = {name: given.pop(name, False) for name in ("add_generation_prompt", "continue_final_message")}
    return render_conversation(template, messages, SPECIAL | given, **flags)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_what_it_renders_in_transformers(template):
    rendered = 0
    for (name, messages), (how, given) in product(CONVERSATIONS.items(), GIVEN.items()):
        expected = outcome(theirs, template, messages, given)
        assert outcome(ours, template, messages, given) == expected, (name, how)
        rendered += isinstance(expected, str)
    assert (rendered == 0) == (template in REFUSED.values())


def test_a_process_that_renders_templates_imports_little():
    program = (
        "import sys; from trio_pool_serve.rendering.chat import template_sandbox; template_sandbox.prepare(); "
        "print(*{'transformers', 'torch', 'numpy', 'tokenizers', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
