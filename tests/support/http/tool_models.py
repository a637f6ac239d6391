"""Tiny models whose chat templates know tools and thinking, in the shapes of well-known models."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel
from tests.support.http.edge_model import MODEL_NAME, write_model_folder

HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n' if messages[0].role == 'system' else '' }}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}
{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
"""As Qwen3's, in short; it thinks only where `enable_thinking` is given."""

LLAMA_TEMPLATE = """\
{%- set asks = namespace(is_told=tools is none) %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Be brief.<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'user' and not asks.is_told %}
{%- set asks.is_told = true %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{{- 'Answer with {"name": a function, "parameters": its arguments by name}.\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping %}{{- message.content | tojson }}
{%- else %}{{- message.content }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model makes one call at a time.') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- if builtin_tools is defined and call.name in builtin_tools %}
{{- '<|python_tag|>' + call.name + '.call(' + call.arguments | tojson + ')<|eom_id|>' }}
{%- else %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- endif %}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""As Llama 3.1's, in short: functions in the first user turn, results from `ipython`, one call."""


@cache
def hermes_model(context: int = 4096) -> TextModel:
    """A model with `HERMES_TEMPLATE` and a context that holds tools."""
    return model_with(HERMES_TEMPLATE, context)


def model_with(
    template: str | None, context: int = 4096, chat: ChatSettings | None = None
) -> TextModel:
    """The tiny model with another chat template; None: the one that it has, without tools."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name))
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = context
        (folder / "config.json").write_text(json.dumps(config))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return TextModel.load(folder, MODEL_NAME, 0, chat or ChatSettings())


def function(name: str, /, description: str = "", **properties: Any) -> dict[str, Any]:
    """A tool of the chat API; all of its properties are required."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


WEATHER = function("get_weather", "The weather of a city", city={"type": "string"})
NOW = function("now", "The time")
