"""Chat templates: the constructs that published templates use, rendered as the reference renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from graphrt.chat_template import ChatTemplate
from graphrt.errors import ModelError, RequestError

USER = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Weather <in> \"Paris\" & Zürich?  "},
    {"role": "assistant", "content": "", "reasoning_content": "look it up\n",
     "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"b": "Zürich", "a": 1}}}]},
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nRain."},
    {"role": "user", "content": "Thanks"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"z": "ä<b>", "a": []}}}]

# Built like Qwen3's: a namespace found from the end, macros, slices, loop.index0, tojson, `is defined`, string methods.
QWEN3_LIKE = """\
{%- macro text(content) -%}
    {{- content.strip() if content is string else '' -}}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not message.content.startswith('<tool') %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last or (loop.index0 > ns.last) or reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Built like Llama 3's: bos_token, dates, `is defined` with set, slices of the messages, trim, tojson(indent=4), raising.
LLAMA3_LIKE = """\
{{- bos_token }}
{%- if not tools is defined or tools is none %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}{{- eos_token }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- message.tool_calls[0].function.arguments | tojson }}
    {%- elif message.content is mapping or message.content is iterable %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GENERATION = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
A:{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}

{% else %}
U:{{ m.content }}
{% endif %}
{% if loop.index0 == 5 %}{% break %}{% endif %}
{% endfor %}
"""


def write(folder: Path, template: str, **config: Any) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(template)
    special = {"bos_token": "<|begin|>", "eos_token": {"content": "<|eot|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | config))
    return ChatTemplate.load(folder)


@pytest.mark.parametrize("source", [QWEN3_LIKE, LLAMA3_LIKE, GENERATION], ids=["qwen3", "llama3", "generation"])
@pytest.mark.parametrize("messages", [USER, TALK], ids=["short", "long"])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False, "date_string": "1 May"}], ids=str)
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_the_reference(
    tmp_path: Path, source: str, messages: list[dict[str, Any]], options: dict[str, Any], prompt: bool
) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    ours = write(tmp_path, source).render(messages, add_generation_prompt=prompt, **options)
    values = {"tools": None, "documents": None, "bos_token": "<|begin|>", "eos_token": "<|eot|>"} | options
    theirs, _ = utils.render_jinja_template([messages], chat_template=source, add_generation_prompt=prompt, **values)
    assert ours == theirs[0]


def test_qwen3_like(tmp_path: Path) -> None:
    template = write(tmp_path, QWEN3_LIKE)
    assert template.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    text = template.render(TALK, tools=TOOLS)
    # Keys in their own order, no HTML escapes, no \\u escapes.
    assert '{"name": "weather", "parameters": {"z": "ä<b>", "a": []}}' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"b": "Zürich", "a": 1}}\n</tool_call>' in text
    assert 'Weather <in> "Paris" & Zürich?<|im_end|>' in text
    assert "rain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>" in text


def test_llama3_like(tmp_path: Path) -> None:
    template = write(tmp_path, LLAMA3_LIKE)
    assert template.render(USER).startswith("<|begin|><|start_header_id|>system")
    assert datetime.now().strftime("Today Date: %d %b %Y") in template.render(USER)
    two = [*USER, {"role": "assistant", "content": "", "tool_calls": [1, 2]}]
    with pytest.raises(
        RequestError, match="refuses the messages: This model only supports single tool-calls"
    ) as caught:
        template.render(two)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_blocks_are_trimmed_and_the_generation_tag_is_only_its_body(tmp_path: Path) -> None:
    talk = [*USER, {"role": "assistant", "content": "Yes"}, *USER]
    assert write(tmp_path, GENERATION).render(talk) == "U:Hi\nA:Yes<|eot|>\nU:Hi\n"


def test_where_templates_are_found(tmp_path: Path) -> None:
    def config(name: str, value: Any) -> None:
        (tmp_path / name).write_text(json.dumps({"chat_template": value}))

    config("tokenizer_config.json", "one {{ messages[0].content }}")
    assert ChatTemplate.load(tmp_path).render(USER) == "one Hi"
    config(
        "tokenizer_config.json", [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "plain"}]
    )
    assert ChatTemplate.load(tmp_path).render(USER) == "plain"
    assert ChatTemplate.load(tmp_path).render(USER, tools=TOOLS) == "tool"
    assert ChatTemplate.load(tmp_path).render(USER, tools=[]) == "plain"
    config("tokenizer_config.json", [{"name": "rag", "template": "only"}])
    assert ChatTemplate.load(tmp_path).render(USER) == "only"
    config("chat_template.json", "from json")
    assert ChatTemplate.load(tmp_path).render(USER) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja é")
    assert ChatTemplate.load(tmp_path).render(USER) == "from jinja é"


def test_a_model_without_a_template_loads_but_does_not_chat(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path)
    assert not template.available
    with pytest.raises(RequestError, match="has no chat template: it is not a chat model"):
        template.render(USER)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[3].content }}", "fails on these messages: .*has no element 3"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: can only concatenate str"),
        ("{{ 1 // 0 }}", "fails on these messages: .*zero"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails on these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "fails on these messages: access to attribute 'append' of .* is unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails on these messages: Range too big"),
    ],
)
def test_failures_are_the_requests(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        write(tmp_path, source).render(USER)


def test_malformed_templates_are_the_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template is malformed: "):
        write(tmp_path, "{% if x %}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for value, message in ((3, "is of type int, expected"), ([{"name": "x"}], "not a list of names and templates")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        with pytest.raises(ModelError, match=message):
            ChatTemplate.load(tmp_path)


def test_tiny_models_chat(tiny_model: Callable[..., Path]) -> None:
    text = ChatTemplate.load(tiny_model("qwen3")).render(USER)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.model
def test_default_model_has_its_own_system_prompt(default_model: Path) -> None:
    template = ChatTemplate.load(default_model)
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(TALK[:2], add_generation_prompt=False).startswith("<|im_start|>system\nBe brief.<|im_end|>")
