"""Chat templates in the form of the models' own: detected format, rendered tools, calls that parse back.

Each template has the part of the model's published template that writes tools and calls.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftproof.text.chat_template import ChatTemplate
from draftproof.text.tool_calls.formats import detect

LOOP = (
    "{% for m in messages %}{% if m.tool_calls %}BODY{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}"
)
EACH = "{% for call in m.tool_calls %}{% set f = call.function %}BODY{% endfor %}"
CHATML_TOOLS = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"


def template(tools: str, call: str, before: str = "", after: str = "") -> str:
    return tools + LOOP.replace("BODY", before + EACH.replace("BODY", call) + after)


QWEN = template(
    "# Tools\n<tools>\n" + CHATML_TOOLS + "</tools>\nreturn a json object within <tool_call></tool_call>\n",
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n',
)
TEMPLATES = {
    "hermes": QWEN,
    "ernie": template(
        "<tool_list>\n{{ tools | tojson }}\n</tool_list>\n",
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n',
    )
    + "{{ '<response>\n' if not messages }}",
    "qwen_xml": template(
        CHATML_TOOLS + "<tool_call>\n<function=example_function_name>\n",
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "glm": template(
        CHATML_TOOLS,
        "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    ),
    "llama3_json": template(
        'Respond in the format {"name": function name, "parameters": dictionary}.\n{{ tools | tojson }}\n',
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    ),
    "pythonic": template(
        "put it in the format of [func_name1(params_name1=params_value1)]\n{{ tools | tojson }}\n",
        "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}, {% endfor %})",
        before="[",
        after="]",
    ),
    "mistral": template(
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}',
        before="[TOOL_CALLS][",
        after="]",
    ),
    "mistral_v11": template(
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    ),
    "deepseek": template(
        CHATML_TOOLS,
        "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```"
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": template(
        CHATML_TOOLS,
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "kimi": template(
        "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "harmony": template(
        "namespace functions {\n{{ tools | tojson }}\n}",
        "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>",
    ),
}
ARGUMENTS = {"city": 'O"slo', "days": 3}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_format_is_detected_and_calls_of_the_template_parse_back(name: str) -> None:
    source = TEMPLATES[name]
    form = detect(source)
    assert form is not None and form.name == name
    arguments: Any = json.dumps(ARGUMENTS) if form.has_text_arguments else ARGUMENTS
    call = {
        "type": "function",
        "id": "functions.weather:0",
        "function": {"name": "weather", "arguments": arguments},
    }
    tools = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}]
    made = ChatTemplate(source, {}, "test")
    question = {"role": "user", "content": "one"}
    shown = made.render([question], tools=tools, add_generation_prompt=True)
    assert '"weather"' in shown
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = made.render(messages, tools=tools, add_generation_prompt=False)
    text = rendered.partition("user: one\n")[2]
    found = form.parse_text(text, {"weather": SCHEMA}).calls
    assert [(each.name, json.loads(each.arguments)) for each in found] == [("weather", ARGUMENTS)], text
