"""Messages in a row, with templates in which the user and the assistant take turns."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from router.text.chat.chat_template import ChatOptions, ChatTemplate
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import WEATHER, model_with

ROW = "[{{ m['role'] }}] {{ m['content'] }}\n"
ALTERNATING = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "[system] {{ messages[0]['content'] }}\n{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) "
    "or m['role'] == 'system' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + ROW + "{% endfor %}"
)
"""As Llama 2's, and Mistral's with a system."""
NO_SYSTEM = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('other roles') }}{% endif %}"
    + ROW
    + "{% endfor %}"
)
"""As Mistral's first ones."""
EVERY = "{% for m in messages %}" + ROW + "{% endfor %}"
ONE_USER = (
    "{% for m in messages %}{% if not loop.first and m['role'] == 'user' and "
    "messages[loop.index0 - 1]['role'] == 'user' %}{{ raise_exception('two users') }}{% endif %}"
    + ROW
    + "{% endfor %}"
)
ASKED = (
    "{% set asked = namespace(found=false) %}{% for m in messages if m['role'] == 'user' %}"
    "{% set asked.found = true %}{% endfor %}"
    "{% if not asked.found %}{{ raise_exception('No user query found') }}{% endif %}" + EVERY
)
"""As Qwen3.5's and later ones."""
STRICT = [ALTERNATING, NO_SYSTEM]

Turns = list[tuple[str, str]]
ROWS: Turns = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]
JOINED: Turns = [("user", "a\n\nb"), ("assistant", "c\n\nd"), ("user", "e")]


def shown(turns: Turns) -> str:
    return "".join(f"[{role}] {content}\n" for role, content in turns)


def rendered(source: str, turns: Turns, **options: Any) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return ChatTemplate(source, {}).render(messages, ChatOptions(**options))


@pytest.mark.covers("J20")
@pytest.mark.parametrize("source", STRICT)
def test_messages_in_a_row_are_one_where_a_template_refuses_them(source: str) -> None:
    assert rendered(source, ROWS) == shown(JOINED)
    assert rendered(source, [*ROWS, ("user", ""), ("user", "f")]) == shown(
        [*JOINED[:2], ("user", "e\n\nf")]
    )


@pytest.mark.covers("J20")
@pytest.mark.parametrize("source", STRICT)
def test_an_assistant_that_begins_follows_a_user_that_says_nothing(source: str) -> None:
    greeted: Turns = [("assistant", "Welcome."), ("user", "Hi")]
    assert rendered(source, greeted) == shown([("user", ""), *greeted])
    told = rendered(source, [("system", "s"), *greeted])
    told_by = "user" if source is NO_SYSTEM else "system"
    silent: Turns = [] if source is NO_SYSTEM else [("user", "")]
    assert told == shown([(told_by, "s"), *silent, *greeted])


@pytest.mark.parametrize("source", STRICT)
def test_a_system_that_says_nothing_may_be_all_there_is(source: str) -> None:
    told_by = "user" if source is NO_SYSTEM else "system"
    assert rendered(source, [("system", "")]) == shown([(told_by, "")])


@pytest.mark.covers("J20")
@pytest.mark.parametrize("source", STRICT)
def test_users_between_whom_the_system_spoke_are_one(source: str) -> None:
    turns: Turns = [("user", "a"), ("system", "s"), ("user", "b")]
    wanted: Turns = [("system", "s"), ("user", "a\n\nb")]
    if source is NO_SYSTEM:
        wanted = [("user", "s\n\na\n\nb")]
    assert rendered(source, turns) == shown(wanted)


@pytest.mark.parametrize("turns", [ROWS, JOINED, ROWS[2:], [("assistant", "x"), ("user", "y")]])
def test_what_a_template_takes_stays_as_it_is(turns: Turns) -> None:
    assert rendered(EVERY, turns) == shown(turns)


def test_only_the_role_that_is_refused_is_joined() -> None:
    wanted = [("user", "a\n\nb"), *ROWS[2:]]
    assert rendered(ONE_USER, ROWS) == shown(wanted)
    begun: Turns = [("assistant", "x"), ("user", "y")]
    assert rendered(ONE_USER, begun) == shown(begun)


@pytest.mark.covers("J20")
@pytest.mark.parametrize("source", STRICT)
def test_a_last_message_that_is_joined_is_continued(source: str) -> None:
    text = rendered(source, ROWS[:4], continues_final_message=True)
    assert text == shown(JOINED[:2]).removesuffix("\n")


def test_thoughts_are_joined_too_and_calls_are_not() -> None:
    thinking = ALTERNATING.replace(ROW, "{{ m.get('reasoning_content', '') }}|" + ROW)
    said = {"role": "assistant", "content": "c", "reasoning_content": "t"}
    user = {"role": "user", "content": "a"}
    more = said | {"content": "d", "reasoning_content": "u"}
    text = ChatTemplate(thinking, {}).render([user, said, more, user], ChatOptions())
    assert "t\n\nu|[assistant] c\n\nd\n" in text
    calling = more | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(InvalidRequest, match="alternate"):
        ChatTemplate(thinking, {}).render([user, said, calling, user], ChatOptions())


CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
}


@pytest.mark.covers("J31")
def test_without_a_user_one_says_nothing_where_a_template_wants_one() -> None:
    """As behind a history that a client has shortened, or where the system alone asks."""
    assert rendered(ASKED, [("system", "s")]) == shown([("system", "s"), ("user", "")])
    rest: Turns = [("assistant", "a"), ("tool", "t")]
    assert rendered(ASKED, rest) == shown([("user", ""), *rest])
    assert rendered(ASKED, [("system", "s"), *rest]) == shown(
        [("system", "s"), ("user", ""), *rest]
    )
    text = ChatTemplate(ASKED, {}).render([CALL, {"role": "tool", "content": "t"}], ChatOptions())
    assert text == shown([("user", ""), ("assistant", ""), ("tool", "t")])
    continued = rendered(ASKED, [("assistant", "a")], continues_final_message=True)
    assert continued == shown([("user", ""), ("assistant", "a")]).removesuffix("\n")


@pytest.mark.parametrize("source", [ASKED, EVERY, ALTERNATING, ONE_USER])
def test_nobody_is_added_where_a_template_takes_what_there_is(source: str) -> None:
    told: Turns = [("system", "s"), ("user", "a")]
    assert rendered(source, told) == shown(told)
    if source != ASKED:
        assert rendered(source, told[:1]) == shown(told[:1])


def prompt_of(edge: Edge) -> str:
    return edge.model.decode(edge.generator.calls[-1].prompt_token_ids, with_special_tokens=True)


@pytest.mark.covers("J20")
@pytest.mark.parametrize("source", STRICT)
@pytest.mark.parametrize(
    ("path", "name"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")]
)
async def test_strict_templates_serve_conversations_with_tools(
    source: str, path: str, name: str
) -> None:
    """What tools returned is a message of the user, and so is what the user then says."""
    edge = make_edge(says("x"), model=model_with(source))
    tool: dict[str, Any] = WEATHER
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it warm?"}]
    if path == "/v1/responses":
        tool = {"type": "function", **WEATHER["function"]}
        call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"}
        messages += [call, {"type": "function_call_output", "call_id": "1", "output": "21"}]
    else:
        function = {"name": "get_weather", "arguments": "{}"}
        calls = [{"id": "1", "type": "function", "function": function}]
        messages += [{"role": "assistant", "tool_calls": calls}]
        messages += [{"role": "tool", "tool_call_id": "1", "content": "21"}]
    messages.append({"role": "user", "content": "And Rome?"})
    async with edge.client() as client:
        reply = await client.post(path, json={name: messages, "tools": [tool]})
    assert reply.status_code == 200, reply.text
    assert prompt_of(edge).endswith("[user] Result of get_weather:\n21\n\nAnd Rome?\n")


LAST = (
    "{% if messages[0]['role'] == 'system' %}[system] {{ messages[0]['content'] }}\n"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}" + ROW + "{% endfor %}"
    "{% if messages[-1]['role'] == 'tool' %}[end]{% endif %}"
)
"""As Nemotron Nano's: it looks at a message behind the system's, of whatever role."""


@pytest.mark.covers("J31")
def test_a_template_that_refuses_the_system_alone_may_take_others_without_a_user() -> None:
    assert rendered(LAST, [("system", "s")]) == shown([("system", "s"), ("user", "")])
    for turns in ([("assistant", "a")], [("system", "s"), ("assistant", "a"), ("assistant", "b")]):
        assert rendered(LAST, turns) == shown(turns)
