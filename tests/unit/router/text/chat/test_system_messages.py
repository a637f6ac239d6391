"""Messages of the system beside the first one, with templates that do not take them."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from router.text.chat.chat_template import ChatOptions, ChatTemplate
from tests.support.http.edge_model import CHAT_TEMPLATE
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import WEATHER, model_with

ROW = "[{{ m['role'] }}] {{ m['content'] }}\n"
FIRST_ALONE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('one system message, first') }}{% endif %}" + ROW + "{% endfor %}"
)
"""As Qwen 3.5's."""
ALTERNATING = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "[system] {{ messages[0]['content'] }}\n{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) "
    "or m['role'] == 'system' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + ROW + "{% endfor %}"
)
"""As Mistral's and Llama 2's."""
LEADING = (
    "{% set s = namespace(over=false) %}{% for m in messages %}"
    "{% if m['role'] != 'system' %}{% set s.over = true %}"
    "{% elif s.over %}{{ raise_exception('the system comes first') }}{% endif %}"
    + ROW
    + "{% endfor %}"
)
LAST_ALONE = (
    "{% set s = namespace(text='') %}{% for m in messages if m['role'] == 'system' %}"
    "{% set s.text = m['content'] %}{% endfor %}[system] {{ s.text }}\n"
    "{% for m in messages if m['role'] != 'system' %}" + ROW + "{% endfor %}"
)
"""As DeepSeek's first one."""
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}" + ROW + "{% endfor %}"
)
EVERY = "{% for m in messages %}" + ROW + "{% endfor %}"

Turns = list[tuple[str, str]]
LEAD: Turns = [("system", "a"), ("system", "b"), ("user", "Hi")]
LATER: Turns = [("system", "a"), ("user", "Hi"), ("assistant", "Yes"), ("system", "b")]
LATER += [("user", "So?")]
BEHIND: Turns = [("user", "Hi"), ("system", "b")]
EMPTY: Turns = [("system", ""), ("system", "b"), ("user", "Hi")]


def shown(turns: Turns) -> str:
    return "".join(f"[{role}] {content}\n" for role, content in turns)


def rendered(source: str, turns: Turns, *, keeps_system: bool = False) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return ChatTemplate(source, {}).render(messages, ChatOptions(keeps_system=keeps_system))


@pytest.mark.covers("J07")
@pytest.mark.parametrize("keeps_system", [False, True])
@pytest.mark.parametrize("source", [FIRST_ALONE, ALTERNATING])
@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (LEAD, [("system", "a\n\nb"), ("user", "Hi")]),
        (LATER, [("system", "a\n\nb"), *LATER[1:3], ("user", "So?")]),
        (BEHIND, [("system", "b"), ("user", "Hi")]),
        (EMPTY, [("system", "b"), ("user", "Hi")]),
    ],
)
def test_what_a_template_refuses_is_in_the_first_message(
    source: str, turns: Turns, wanted: Turns, keeps_system: bool
) -> None:
    assert rendered(source, turns, keeps_system=keeps_system) == shown(wanted)


@pytest.mark.parametrize("keeps_system", [False, True])
@pytest.mark.parametrize(
    ("source", "turns"),
    [
        *((EVERY, turns) for turns in (LEAD, LATER, BEHIND, EMPTY)),
        (LEADING, LEAD),
        (FIRST_ALONE, LATER[:3]),
        (ALTERNATING, LATER[1:3]),
        (NO_SYSTEM, LATER[1:3]),
    ],
)
def test_what_a_template_takes_stays_as_it_is(
    source: str, turns: Turns, keeps_system: bool
) -> None:
    assert rendered(source, turns, keeps_system=keeps_system) == shown(turns)


def test_what_may_lead_is_merged_only_where_others_follow() -> None:
    merged = [("system", "a\n\nb"), ("user", "Hi"), ("assistant", "Yes"), ("user", "So?")]
    assert rendered(LEADING, LATER) == shown(merged)


@pytest.mark.parametrize("turns", [LEAD, LATER])
def test_what_a_template_leaves_out_is_kept_where_that_is_asked_for(turns: Turns) -> None:
    """Other prompts are as they always were."""
    others = [turn for turn in turns if turn[0] != "system"]
    assert rendered(LAST_ALONE, turns) == shown([("system", "b"), *others])
    kept = rendered(LAST_ALONE, turns, keeps_system=True)
    assert kept == shown([("system", "a\n\nb"), *others])


@pytest.mark.covers("J21")
@pytest.mark.parametrize("keeps_system", [False, True])
@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (LEAD, [("user", "a\n\nb\n\nHi")]),
        (LATER, [("user", "a\n\nb\n\nHi"), ("assistant", "Yes"), ("user", "So?")]),
        (BEHIND, [("user", "b\n\nHi")]),
        ([("system", ""), ("user", "Hi")], [("user", "Hi")]),
        ([("system", "a")], [("user", "a")]),
        ([("system", "")], [("user", "")]),
        ([("system", "a"), *LATER[2:3]], [("user", "a"), ("assistant", "Yes")]),
        ([("system", ""), *LATER[1:3]], LATER[1:3]),
    ],
)
def test_a_template_without_a_system_gets_its_text_in_the_first_message_of_the_user(
    turns: Turns, wanted: Turns, keeps_system: bool
) -> None:
    assert rendered(NO_SYSTEM, turns, keeps_system=keeps_system) == shown(wanted)


def test_a_template_that_takes_no_user_either_refuses_as_before() -> None:
    with pytest.raises(InvalidRequest, match="nobody"):
        rendered("{{ raise_exception('nobody') }}", LEAD)


def prompt_of(edge: Edge) -> str:
    return edge.model.decode(edge.generator.calls[-1].prompt_token_ids, with_special_tokens=True)


CODEX: dict[str, Any] = {
    "instructions": "a",
    "input": [{"role": "developer", "content": "b"}, {"role": "user", "content": "Hi"}],
}
CHAT: dict[str, Any] = {
    "messages": [{"role": role, "content": text} for role, text in [("developer", "a"), *LEAD[1:]]]
}
CLAUDE: dict[str, Any] = {
    "max_tokens": 9,
    "system": "a",
    "messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "b"}],
}


@pytest.mark.covers("J07")
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", CODEX), ("/v1/chat/completions", CHAT), ("/v1/messages", CLAUDE)],
)
async def test_every_endpoint_serves_a_strict_template(path: str, body: dict[str, Any]) -> None:
    edge = make_edge(says("x"), model=model_with(FIRST_ALONE))
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert prompt_of(edge) == "[system] a\n\nb\n[user] Hi\n"


async def test_tools_are_explained_in_the_one_message() -> None:
    edge = make_edge(says("x"), model=model_with(FIRST_ALONE))
    async with edge.client() as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | {"tools": [WEATHER]})
    assert reply.status_code == 200, reply.text
    assert prompt_of(edge).startswith("[system] a\n\nYou can call functions.")
    assert prompt_of(edge).endswith("\n\nb\n[user] Hi\n")


async def test_the_plain_template_gets_two_messages_as_before() -> None:
    edge = make_edge(says("x"), model=model_with(CHAT_TEMPLATE))
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
    turns = ("system\na", "system\nb", "user\nHi")
    wanted = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt_of(edge) == f"{wanted}<|im_start|>assistant\n"
