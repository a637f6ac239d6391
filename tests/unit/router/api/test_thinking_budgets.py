"""Budgets of thinking: what clients call them, and what nodes are told."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from common.token_rules import ThinkingBudget, TokenRules
from router.text.text_model import TextModel
from tests.support.http.edge_model import MODEL_NAME, write_model_folder
from tests.support.http.http_edge import make_edge
from tests.support.http.tool_models import HERMES_TEMPLATE, NOW

CHAT_PATH, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
TAGS = ("<think>", "</think>")
BEGUN = "{{ messages[-1].content }}<think>\n{# </think> #}"
FREE = "{{ messages[-1].content }}{# <think> </think> #}"
"""A template that begins the thinking, and one that leaves it to the model."""


@cache
def model(template: str = BEGUN, tags: tuple[str, ...] = TAGS) -> TextModel:
    """`tags` are tokens of their own."""
    with TemporaryDirectory() as name:
        folder = write_model_folder(Path(name))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken(tag) for tag in tags])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        config |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(template)
        return TextModel.load(folder, MODEL_NAME, 0)


async def rules_of(
    body: dict[str, Any], path: str = CHAT_PATH, of: TextModel | None = None
) -> TokenRules:
    """What nodes are told of a request's tokens."""
    edge = make_edge(model=of or model())
    async with edge.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return edge.generator.calls[0].sampling.rules


def budget(num_tokens: int) -> ThinkingBudget:
    [end] = model().spelt("</think>")
    return ThinkingBudget(num_tokens=num_tokens, end_token_id=end)


@pytest.mark.covers("T44")
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT_PATH, {"thinking_token_budget": 20}),
        (CHAT_PATH, {"thinking_token_budget": 20.0}),
        (CHAT_PATH, {"thinking_budget": 20}),
        (CHAT_PATH, {"thinking_budget_tokens": 20}),
        (CHAT_PATH, {"thinking": {"type": "enabled", "budget_tokens": 20}}),
        (CHAT_PATH, {"thinking": {"type": "enabled", "budget_tokens": 20.0}}),
        (CHAT_PATH, {"reasoning": {"max_tokens": 20}}),
        (CHAT_PATH, {"thinking_token_budget": -1, "thinking_budget": 20}),
        (CHAT_PATH, {"thinking_token_budget": 20, "thinking": {"budget_tokens": 30}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 20}}),
        (MESSAGES, {"thinking_token_budget": 20}),
        (RESPONSES, {"thinking_token_budget": 20}),
    ],
)
async def test_a_budget_has_the_names_that_clients_have_for_it(
    path: str, more: dict[str, Any]
) -> None:
    body = {"input": "Hi", "max_output_tokens": 50} if path == RESPONSES else CHAT
    assert (await rules_of(body | more, path)).thinking == budget(20)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": None},
        {"thinking": {"type": "enabled", "budget_tokens": None}},
        {"thinking": {"type": "adaptive"}},
        {"thinking_token_budget": 50},
        {"thinking_token_budget": 10**30},
    ],
)
async def test_nothing_is_ended_where_no_limit_is_set_or_the_answer_ends_before(
    more: dict[str, Any],
) -> None:
    assert (await rules_of(CHAT | more)).thinking is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_budget": "many"}, "thinking_budget"),
        ({"thinking_budget_tokens": 1.5}, "thinking_budget_tokens"),
        ({"reasoning": {"max_tokens": "many"}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0.5}}, "thinking.budget_tokens"),
    ],
)
async def test_what_is_no_budget_is_named(more: dict[str, Any], param: str) -> None:
    edge = make_edge(model=model())
    async with edge.client() as client:
        answer = await client.post(CHAT_PATH, json=CHAT | more)
        of_messages = await client.post(MESSAGES, json=CHAT | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    if "thinking" in more:
        assert of_messages.status_code == 400
        assert param in of_messages.json()["error"]["message"]


@pytest.mark.parametrize("field", ["thinking", "reasoning"])
@pytest.mark.parametrize("value", ["high", ["high"], 5])
async def test_a_field_about_thinking_of_another_type_is_told_which_it_may_have(
    field: str, value: object
) -> None:
    edge = make_edge(model=model())
    async with edge.client() as client:
        answer = await client.post(CHAT_PATH, json=CHAT | {field: value})
    error = answer.json()["error"]
    wanted = f"{field} has the wrong type: wanted true, false or an object"
    assert (answer.status_code, error["param"], error["message"]) == (400, field, wanted)


@pytest.mark.covers("T44")
async def test_thinking_that_the_model_begins_is_counted_behind_its_first_tag() -> None:
    free = model(FREE)
    [begin], [end] = map(free.spelt, TAGS)
    rules = await rules_of(CHAT | {"thinking_token_budget": 20}, of=free)
    assert rules.thinking == ThinkingBudget(
        num_tokens=20, end_token_id=end, begin_token_ids=(begin,)
    )


async def test_a_thinking_that_a_client_began_has_its_budget() -> None:
    free = model(FREE)
    [end] = free.spelt("</think>")
    begun = {"role": "assistant", "content": "<think>\nwell"}
    body = CHAT | {
        "messages": [*CHAT["messages"], begun],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 20,
    }
    rules = await rules_of(body, of=free)
    assert rules.thinking == ThinkingBudget(num_tokens=20, end_token_id=end)


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ messages[-1].content }}", TAGS),  # which thinks nothing
        ("{{ messages[-1].content }}<think></think>", TAGS),  # nor does this
        (BEGUN, ("<think>",)),
        (FREE, ("<think>",)),
        (FREE, ("</think>",)),
    ],
)
async def test_without_thinking_or_tokens_for_its_tags_there_is_no_budget(
    template: str, tags: tuple[str, ...]
) -> None:
    rules = await rules_of(CHAT | {"thinking_token_budget": 20}, of=model(template, tags))
    assert rules.thinking is None


async def test_tools_and_schemas_have_budgets_too() -> None:
    of = model(HERMES_TEMPLATE)
    [end] = of.spelt("</think>")
    asked = CHAT | {"tools": [NOW], "thinking": {"type": "enabled", "budget_tokens": 20}}
    rules = await rules_of(asked, of=of)
    assert rules.thinking == ThinkingBudget(num_tokens=20, end_token_id=end)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"thinking_token_budget": 0}, "False False 0"),
        ({"thinking_token_budget": 9}, "- - 9"),
        ({"thinking_token_budget": 0, "enable_thinking": True}, "True True 0"),
        ({"thinking_token_budget": 9, "enable_thinking": False}, "False False 0"),
        ({"thinking_token_budget": 9, "reasoning_effort": "none"}, "False False 0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "True True 9"),
        ({"thinking_token_budget": 9, "chat_template_kwargs": {"thinking_budget": 4}}, "- - 4"),
    ],
)
async def test_templates_that_know_budgets_are_told(more: dict[str, Any], wanted: str) -> None:
    names = ("enable_thinking", "thinking", "thinking_budget")
    of = model(" ".join(f"{{{{ {name} | default('-') }}}}" for name in names))
    edge = make_edge(model=of)
    async with edge.client() as client:
        answer = await client.post(CHAT_PATH, json=CHAT | more)
    assert answer.status_code == 200, answer.text
    assert of.decode(edge.generator.calls[0].prompt_token_ids) == wanted
