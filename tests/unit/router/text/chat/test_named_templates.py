"""Chat templates by name, and which of them requests with tools get."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles
from router.text.chat.chat_template import ChatOptions
from router.text.chat.conversation import ChatSettings, Conversation
from router.text.model_files import read_chat_templates
from router.tools.fenced import FENCED
from router.tools.formats import HERMES
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import HERMES_TEMPLATE, WEATHER, model_with

PLAIN = "plain{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
OTHER = "other{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
CALLS = "{% for c in m.tool_calls %}[CALL] {{ c.function.name }} ARGUMENTS{% endfor %}"
WITH_CALLS = (
    f"plain{{% for m in messages %}}[{{{{ m.role }}}}] {{{{ m.content }}}}{CALLS}{{% endfor %}}"
)
UNKNOWN = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}" + WITH_CALLS.replace(
    "ARGUMENTS", "{{ c.function.arguments | tojson }}"
)
"""Its calls are in a format that the server does not know."""
JOINED = UNKNOWN.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
"""As DeepSeek's: arguments are joined as text."""
SHOWN = UNKNOWN.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")
SHORT_IDS = UNKNOWN.replace(
    "[CALL]",
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}[CALL]",
)
"""As Mistral's."""
WITHOUT_TEXT = UNKNOWN.replace("m.tool_calls", "m.tool_calls if m.content is none")
"""As DeepSeek's: calls are left out beside a text."""
BESIDE_TEXT = UNKNOWN.replace("m.tool_calls", "m.tool_calls if not m.content")
"""As templates that show either a text or calls."""
BESIDE_NO_TEXT = UNKNOWN.replace("m.tool_calls", "m.tool_calls if m.content")
NO_CALLS = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}" + PLAIN
MESSAGES = [{"role": "user", "content": "Hi"}]
CALLED: list[dict[str, Any]] = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "done", "tool_call_id": "1"},
]


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def conversation(
    folder: Path, template: Any, files: dict[str, str] | None = None, **settings: Any
) -> Conversation:
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    config = {} if template is None else {"chat_template": template}
    return Conversation.load(folder, config, ChatSettings(**settings), {}, KeptFiles())


def prompt(chat: Conversation, messages: Any = MESSAGES, *, has_tools: bool) -> str:
    return chat.render(messages, ChatOptions(tools=[WEATHER] if has_tools else []))


FOLDERS: list[tuple[Any, dict[str, str]]] = [
    (named(default=PLAIN, tool_use=HERMES_TEMPLATE), {}),
    (named(rag=OTHER, tool_use=HERMES_TEMPLATE, default=PLAIN), {}),
    ({"default": PLAIN, "tool_use": HERMES_TEMPLATE}, {}),
    (PLAIN, {"additional_chat_templates/tool_use.jinja": HERMES_TEMPLATE}),
    (
        OTHER,
        {
            "chat_template.jinja": PLAIN,
            "additional_chat_templates/tool_use.jinja": HERMES_TEMPLATE,
            "additional_chat_templates/rag.jinja": OTHER,
        },
    ),
    (
        named(default=OTHER, tool_use=OTHER),
        {
            "chat_template.jinja": PLAIN,
            "additional_chat_templates/tool_use.jinja": HERMES_TEMPLATE,
        },
    ),
]


@pytest.mark.covers("J08")
@pytest.mark.parametrize(("template", "files"), FOLDERS)
def test_a_template_for_tools_by_name_is_used(
    template: Any, files: dict[str, str], tmp_path: Path
) -> None:
    chat = conversation(tmp_path, template, files)
    assert prompt(chat, has_tools=False) == "plain[user] Hi"
    assert "# Tools" in prompt(chat, has_tools=True)
    assert "<tool_response>done" in prompt(chat, CALLED, has_tools=True)
    assert "<tool_response>done" in prompt(chat, CALLED, has_tools=False)
    assert chat.call_format() is HERMES


@pytest.mark.parametrize(
    ("template", "files"),
    [
        (named(tool_use=HERMES_TEMPLATE), {}),
        (None, {"additional_chat_templates/tool_use.jinja": HERMES_TEMPLATE}),
    ],
)
def test_a_template_for_tools_that_stands_alone_is_for_all_chats(
    template: Any, files: dict[str, str], tmp_path: Path
) -> None:
    chat = conversation(tmp_path, template, files)
    assert prompt(chat, has_tools=False).startswith("<|im_start|>user\nHi<|im_end|>")
    assert "# Tools" in prompt(chat, has_tools=True)


@pytest.mark.covers("J08")
@pytest.mark.parametrize(
    ("template", "settings", "words", "form"),
    [
        (HERMES_TEMPLATE, {}, "# Tools", HERMES),
        # The model's own template goes before a named one, as it always did.
        (named(default=HERMES_TEMPLATE, tool_use=OTHER + "{{ tools }}"), {}, "# Tools", HERMES),
        (PLAIN, {}, "You can call functions", FENCED),
        (UNKNOWN, {}, "You can call functions", FENCED),
        (named(default=PLAIN, tool_use=UNKNOWN), {}, "You can call functions", FENCED),
        (named(default=UNKNOWN, tool_use=HERMES_TEMPLATE), {}, "# Tools", HERMES),
        (UNKNOWN, {"tool_format": "hermes"}, "[AVAILABLE_TOOLS]", HERMES),
        (HERMES_TEMPLATE, {"tool_template": "builtin"}, "You can call functions", FENCED),
        (HERMES_TEMPLATE, {"tool_template": ""}, "# Tools", HERMES),
        (named(default=PLAIN), {}, "You can call functions", FENCED),
    ],
)
def test_which_template_tools_get(
    template: Any, settings: dict[str, Any], words: str, form: Any, tmp_path: Path
) -> None:
    chat = conversation(tmp_path, template, **settings)
    assert words in prompt(chat, has_tools=True)
    assert chat.call_format() is form


@pytest.mark.parametrize("template", [UNKNOWN, named(default=UNKNOWN, tool_use=HERMES_TEMPLATE)])
def test_earlier_calls_alone_are_rendered_by_the_models_own_template(
    template: Any, tmp_path: Path
) -> None:
    assert prompt(conversation(tmp_path, template), CALLED, has_tools=False).startswith("plain")


PARIS: list[dict[str, Any]] = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_of_another_server",
                "type": "function",
                "function": {"name": "f", "arguments": {"city": "São Paulo", "days": [1, 2.5]}},
            }
        ],
    },
    {"role": "tool", "content": "done", "tool_call_id": "call_of_another_server"},
]
ARGUMENTS = '{"city": "São Paulo", "days": [1, 2.5]}'


@pytest.mark.covers("J13")
@pytest.mark.parametrize("source", [UNKNOWN, JOINED, SHOWN, SHORT_IDS])
def test_a_template_gets_arguments_in_the_form_that_it_takes(source: str, tmp_path: Path) -> None:
    text = prompt(conversation(tmp_path, source), PARIS, has_tools=False)
    assert text == f"plain[user] Hi[assistant] [CALL] f {ARGUMENTS}[tool] done"


SHOWN_IDS = SHORT_IDS.replace("[{{ m.role }}]", "[{{ m.role }} {{ m.tool_call_id }}]").replace(
    "[CALL]", "[CALL {{ c.id }}]"
)


@pytest.mark.covers("J13")
@pytest.mark.parametrize("call_id", ["call_of_another_server", "", "a1B2c3D4e", "é" * 9])
def test_a_call_and_its_result_get_the_same_short_id(call_id: str, tmp_path: Path) -> None:
    messages = [*answered((call_id, "a"), ("0", "b")), result(call_id, "1"), result("0", "2")]
    text = prompt(conversation(tmp_path, SHOWN_IDS), [*MESSAGES, *messages], has_tools=False)
    calls, results = re.findall(r"\[CALL (\w+)\]", text), re.findall(r"\[tool (\w+)\]", text)
    assert calls == results
    assert len(set(calls)) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in calls)
    assert (calls[0] == call_id) is (call_id == "a1B2c3D4e")


@pytest.mark.covers("J13")
@pytest.mark.parametrize("source", [WITHOUT_TEXT, BESIDE_TEXT, BESIDE_NO_TEXT, NO_CALLS])
def test_a_template_that_shows_no_earlier_calls_gets_them_as_text(
    source: str, tmp_path: Path
) -> None:
    text = prompt(conversation(tmp_path, source), PARIS, has_tools=False)
    call = FENCED.call_text("f", ARGUMENTS)
    assert text == f"plain[user] Hi[assistant] {call}[user] Result of f:\ndone"


@pytest.mark.covers("J13")
@pytest.mark.parametrize(
    ("arguments", "form"),
    [("{{ call.function.arguments }}", HERMES), ("{{ 1 // 0 }}", FENCED)],
)
def test_a_tool_template_in_a_known_format_too(arguments: str, form: Any, tmp_path: Path) -> None:
    source = HERMES_TEMPLATE.replace("{{ call.function.arguments | tojson }}", arguments)
    chat = conversation(tmp_path, source)
    assert chat.call_format() is form
    for has_tools in (False, True):
        assert form.call_text("f", ARGUMENTS) in prompt(chat, PARIS, has_tools=has_tools)


def answered(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """An answer that calls functions by id and name."""
    made = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": {}}}
        for one, name in calls
    ]
    return [{"role": "assistant", "content": "", "tool_calls": made}]


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


@pytest.mark.covers("J14")
@pytest.mark.parametrize(
    "messages",
    [
        [*answered(("0", "a")), result("0", "1"), *answered(("0", "b")), result("0", "2")],
        [*answered(("0", "a"), ("0", "b")), result("0", "1"), result("0", "2")],
        [*answered(("0", "a"), ("1", "b")), result("1", "2"), result("0", "1")],
        [*answered(("", "a"), ("", "b")), result("", "1"), result("", "2")],
    ],
)
def test_a_result_is_told_as_that_of_the_call_it_answers(
    messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = prompt(conversation(tmp_path, PLAIN), [*MESSAGES, *messages], has_tools=False)
    assert "Result of a:\n1" in text
    assert "Result of b:\n2" in text


@pytest.mark.parametrize(
    ("template", "name"),
    [(5, "default"), ([*named(default=PLAIN), {"name": "tool_use", "template": 5}], "tool_use")],
)
def test_a_template_that_is_no_text_is_named(template: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"chat_template .* is a int \({name}\)"):
        conversation(tmp_path, template)


def test_a_named_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    path.parent.mkdir()
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja cannot be read"):
        conversation(tmp_path, PLAIN)
    path.write_text("{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        conversation(tmp_path, PLAIN)


@pytest.mark.parametrize("template", [None, [], named(rag=OTHER), ["x"]])
def test_a_checkpoint_without_such_templates(template: Any, tmp_path: Path) -> None:
    assert read_chat_templates(tmp_path, {"chat_template": template}, KeptFiles()) == {}


@pytest.mark.covers("J08")
async def test_tools_need_no_flag() -> None:
    """As with the demo model, whose template has none."""
    text = FENCED.call_text("get_weather", '{"city": "Paris"}')
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    async with make_edge(says(text), model=model_with(None)).client() as client:
        reply = await client.post("/v1/chat/completions", content=json.dumps(body))
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
