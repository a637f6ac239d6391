"""Models that write calls in their own formats: found by the template, on every API, and back."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from router.text.text_model import TextModel
from router.tools.call_format import CallFormat
from router.tools.formats import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GLM,
    GLM_WITHOUT_LINES,
    GRANITE,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    SEED,
)
from tests.support.http.edge_model import MODEL_NAME, write_model_folder
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import plays
from tests.support.http.tool_models import NOW, WEATHER
from tests.unit.router.api.answers.streamed_parts import APIS, Api, grouped, joined

HEAD = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
)
FOOT = "{% endfor %}\n{% endfor %}{{ '<think>\n' if enable_thinking else '' }}{# </think> #}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
CHECKED = (
    "{% if c.id is not string or c.id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
)
TEMPLATES: dict[str, tuple[CallFormat, str]] = {
    "Qwen3-Coder": (
        QWEN_CODER,
        "<tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>\n" + VALUE
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "Seed-OSS": (
        SEED,
        "<seed:tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>" + VALUE
        + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    ),
    "GLM-4.5": (
        GLM,
        "<tool_call>{{ f.name + '\n' }}" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE
        + "</arg_value>{{ '\n' }}{% endfor %}</tool_call>",
    ),
    "GLM-4.7": (
        GLM_WITHOUT_LINES,
        "<tool_call>{{ f.name }}" + ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>" + VALUE
        + "</arg_value>{% endfor %}</tool_call>",
    ),
    "MiniMax-M2": (
        MINIMAX,
        '{{ "<minimax:tool_call>\n" if loop.first }}<invoke name="{{ f.name }}">\n' + ITEMS
        + '<parameter name="{{ k }}">' + VALUE + "</parameter>\n{% endfor %}</invoke>\n"
        "{{ '</minimax:tool_call>' if loop.last }}",
    ),
    "Mistral v3": (
        MISTRAL,
        CHECKED + "{{ '[TOOL_CALLS][' if loop.first }}{\"name\": \"{{ f.name }}\", \"arguments\": "
        "{{ f.arguments | tojson }}, \"id\": \"{{ c.id }}\"}{{ ']' if loop.last else ', ' }}",
    ),
    "Mistral v11": (
        MISTRAL_ARGS,
        CHECKED + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}",
    ),
    "Mistral v13": (MISTRAL_ARGS, "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "DeepSeek V3": (
        DEEPSEEK_FENCED,
        "{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>{{ f.name + '\n```json\n' + f.arguments + '\n```' }}<｜tool▁call▁end｜>"
        "{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    ),
    "DeepSeek V3.1": (
        DEEPSEEK,
        "{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>{{ f.name }}"
        "<｜tool▁sep｜>{{ '' + f.arguments }}<｜tool▁call▁end｜>"
        "{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    ),
    "Granite 3": (
        GRANITE,
        "{{ '<|tool_call|>[' if loop.first }}{\"name\": \"{{ f.name }}\", \"arguments\": "
        "{{ f.arguments | tojson }}}{{ ']' if loop.last else ', ' }}",
    ),
}  # fmt: skip
NAMES = list(TEMPLATES)
CITY = '{"city": "\\nZürich </b> 🌞 \\"x\\"\\n"}'
NAMED = {"type": "function", "function": {"name": "now"}}
CALLS = [("get_weather", CITY), ("now", "{}")]


@cache
def model_of(name: str, are_special: bool) -> TextModel:
    """A model with that template, whose tags are control tokens or text."""
    form, calls = TEMPLATES[name]
    with TemporaryDirectory() as path:
        folder = write_model_folder(Path(path))
        if are_special:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tags = [AddedToken(tag, special=True) for tag in sorted(form.tags)]
            tokenizer.add_special_tokens(tags)
            tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        config |= {"vocab_size": size, "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(HEAD + calls + FOOT)
        return TextModel.load(folder, MODEL_NAME, 0)


@pytest.mark.covers("J32", "G14", "G20")
@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@pytest.mark.parametrize("name", NAMES)
async def test_calls_of_any_groups_of_tokens_on_every_api(
    name: str, api: Api, are_special: bool
) -> None:
    model, (form, _) = model_of(name, are_special), TEMPLATES[name]
    assert model.chat.call_format() is form
    text = f"\nIt is Zürich\n</think>\n\nI look now.\n{form.calls_text(CALLS)}"
    token_ids = [*model.spelt(text), *sorted(model.eos_token_ids)]
    for seed in range(6):
        edge = make_edge(plays(grouped(token_ids, random.Random(seed))), model=model)
        async with edge.client() as client:
            streamed = await client.post(api.path, json=api.body | {"stream": True})
            whole = await client.post(api.path, json=api.body)
        assert (streamed.status_code, whole.status_code) == (200, 200), whole.text
        *parts, (end, _) = joined(api, streamed.text)
        assert parts == [("thinking", "It is Zürich"), ("text", "I look now."), *CALLS]
        assert end == api.ends[0]
        assert form.trigger not in whole.text
        assert json.dumps("</b>")[1:-1] in whole.text


@pytest.mark.covers("J13", "J32")
@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_earlier_calls_are_in_the_prompt_as_the_model_writes_them(
    name: str, are_special: bool
) -> None:
    model, (form, _) = model_of(name, are_special), TEMPLATES[name]
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(CALLS)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    ]
    edge = make_edge(plays(grouped([*model.spelt("Hi")], random.Random(0))), model=model)
    body = {"messages": messages, "tools": [WEATHER, NOW]}
    async with edge.client() as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    prompt = model.decode(edge.generator.calls[0].prompt_token_ids, with_special_tokens=True)
    assert "You can call functions" not in prompt
    written = form.calls_text(CALLS)
    if name == "Mistral v3":
        written = written.partition("}, {")[0]
    if name == "Mistral v11":
        written = written.partition("[ARGS]")[0]
    if form.separator:
        assert written.replace(form.separator + form.trigger, form.trigger) in prompt
    else:
        assert written.strip() in prompt
    assert prompt.index("sunny") < prompt.index("12:00")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", "auto", "none", NAMED])
async def test_choices_of_tools(name: str, choice: Any) -> None:
    model, (form, _) = model_of(name, True), TEMPLATES[name]
    said = form.call_text("now", "{}")
    edge = make_edge(plays(grouped([*model.spelt(said)], random.Random(1))), model=model)
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "tools": [WEATHER, NOW], "tool_choice": choice}
    async with edge.client() as client:
        reply = await client.post("/v1/chat/completions", json=body)
    (answer,) = reply.json()["choices"]
    if choice == "none":
        assert "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "stop"
        return
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert answer["finish_reason"] == ("stop" if isinstance(choice, dict) else "tool_calls")
    assert edge.generator.calls[0].sampling.grammar is not None
