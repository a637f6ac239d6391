"""A tiny model that answers in harmony: its tags are tokens, its template is as that of gpt-oss."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer

from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel
from router.tools.harmony.tags import MARKS
from tests.support.http.edge_model import MODEL_NAME, write_model_folder

HARMONY_TEMPLATE = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>Reasoning: ' + effort + '<|end|>' }}
{%- set told = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{%- if told or tools %}{{- '<|start|>developer<|message|>' + told }}
{%- for tool in tools or [] %}
{{- '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {' }}
{%- for name, one in tool.function.parameters.properties.items() %}
{{- ' // ' + one.description + '\\n' + name + ': ' + (one.type or 'any') }}
{%- if one.enum and one.default is defined %}{{- ' = ' + one.default }}{% endif %}{% endfor %}
{{- '}) => any;' }}
{%- endfor %}{{- '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('Not both.') }}{% endif %}
{%- set before = message.content or message.thinking %}
{%- if before %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + before + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{%- set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('No call is before it.') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""What it refuses, leaves out and fails on is as in gpt-oss's; its words are fewer."""


@cache
def harmony_model(
    template: str = HARMONY_TEMPLATE, chat: ChatSettings | None = None, has_tokens: bool = True
) -> TextModel:
    """Without `has_tokens` the tags are text."""
    with TemporaryDirectory() as name:
        folder = write_harmony_folder(Path(name), template, has_tokens=has_tokens)
        return TextModel.load(folder, MODEL_NAME, 0, chat or ChatSettings())


def write_harmony_folder(
    folder: Path, template: str = HARMONY_TEMPLATE, *, has_tokens: bool = True
) -> Path:
    write_model_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if has_tokens:
        tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
