"""A stop string ends what a client gets as text: not what the model thinks, where that is apart."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import FinishReason
from router.text.chat.conversation import ChatSettings
from tests.support.http.edge_model import BOS
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import chunks, plays, says
from tests.support.http.tool_models import HERMES_TEMPLATE, hermes_model, model_with

SAID = "\nQuestion: two and two?\n\nSo four.\n</think>\n\nFour.\n\nQuestion: three?"
THOUGHT = "Question: two and two?\n\nSo four."
STOPS = ["Question:", "\n\n"]
QUESTION = {"messages": [{"role": "user", "content": "Two and two?"}]}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def edge_that_thinks(size: int = 1) -> Edge:
    return make_edge(says(SAID, size=size), model=hermes_model())


async def post(edge: Edge, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with edge.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_chat_ends_at_a_stop_string_of_its_text(size: int) -> None:
    edge = edge_that_thinks(size)
    answer = await post(edge, "/v1/chat/completions", QUESTION | THINK | {"stop": STOPS})
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == "Four."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n\n")


async def test_a_message_ends_at_a_stop_string_of_its_text() -> None:
    body = QUESTION | {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 9}}
    answer = await post(edge_that_thinks(), "/v1/messages", body | {"stop_sequences": STOPS})
    thought, text = answer["content"]
    assert (thought["thinking"], text["text"]) == (THOUGHT, "Four.")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\n")


async def test_thinking_that_is_text_ends_at_a_stop_string() -> None:
    model = model_with(HERMES_TEMPLATE, chat=ChatSettings(reasoning_format="none"))
    edge = make_edge(says(SAID), model=model)
    answer = await post(edge, "/v1/chat/completions", QUESTION | THINK | {"stop": ["two?"]})
    assert answer["choices"][0]["message"]["content"] == "\nQuestion: two and "


@pytest.mark.covers("T24")
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("path", "body", "field", "end"),
    [
        ("/v1/completions", {"prompt": "Hi"}, "stop", ("stop", BOS)),
        ("/v1/chat/completions", QUESTION, "stop", ("stop", BOS)),
        ("/v1/responses", {"input": "Hi"}, "stop", ("completed",)),
        (
            "/v1/messages",
            QUESTION | {"max_tokens": 99},
            "stop_sequences",
            ("stop_sequence", BOS),
        ),
    ],
)
async def test_a_special_token_ends_an_answer_where_a_stop_string_names_it(
    path: str, body: dict[str, Any], field: str, end: tuple[str, ...], size: int
) -> None:
    """It has no text, so without that the answer would run on up to its limit, unseen."""
    model = hermes_model()
    token_ids = model.spelt(f"Four.{BOS}user")
    parts = chunks(token_ids, FinishReason.LENGTH, size=size)
    for stops in ([BOS], ["zzz", f"{BOS}use", BOS]):
        answer = await post(make_edge(plays(parts), model=model), path, body | {field: stops})
        if "choices" in answer:
            (choice,) = answer["choices"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            told: tuple[str, ...] = (choice["finish_reason"], choice["stop_reason"])
        elif "output" in answer:
            text, told = answer["output"][0]["content"][0]["text"], (answer["status"],)
        else:
            text = answer["content"][0]["text"]
            told = (answer["stop_reason"], answer["stop_sequence"])
        assert (text, told) == ("Four.", end)


@pytest.mark.covers("T24")
async def test_one_within_the_thinking_does_not_end_it() -> None:
    model = hermes_model()
    token_ids = model.spelt(f"\nSo{BOS} four.\n</think>\n\nFour.{BOS}user")
    edge = make_edge(plays(chunks(token_ids, FinishReason.LENGTH)), model=model)
    answer = await post(edge, "/v1/chat/completions", QUESTION | THINK | {"stop": BOS})
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So four.", "Four.")


@pytest.mark.covers("T43")
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": False}),
        ("/v1/messages", {"max_tokens": 99}),
    ],
)
async def test_thinking_that_a_client_began_goes_on(path: str, more: dict[str, Any]) -> None:
    """As clients begin it that want a model to think, which it might leave out."""
    begun = {"role": "assistant", "content": "<think>\nFirst"}
    body = more | {"messages": [*QUESTION["messages"], begun]}
    stop = {"stop_sequences" if path == "/v1/messages" else "stop": ["Question:"]}
    answer = await post(edge_that_thinks(), path, body | stop)
    if path == "/v1/messages":
        thought, text = (one[one["type"]] for one in answer["content"])
    else:
        message = answer["choices"][0]["message"]
        thought, text = message["reasoning_content"], message["content"]
    assert (thought, text) == (THOUGHT, "Four.\n\n")
