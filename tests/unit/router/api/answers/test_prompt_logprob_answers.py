"""Log probabilities of prompts: `echo` with `logprobs`, `prompt_logprobs`, and no answer at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.request import FinishReason
from tests.support.http.edge_model import CONTEXT, tiny_model
from tests.support.http.http_edge import make_edge
from tests.support.http.posted import CHAT, CHAT_PATH, TEXT, TEXT_PATH, encode, post
from tests.support.http.scripted_generator import Call, says
from tests.support.http.tool_models import hermes_model

MODEL = tiny_model()
ECHO = TEXT | {"echo": True, "logprobs": 2, "prompt": "Hello world"}


def described(token_id: int) -> str:
    return MODEL.describe_token(token_id).text


@pytest.mark.covers("T32")
async def test_an_echo_begins_with_the_prompts_own_tokens() -> None:
    edge = make_edge(says("lazy", FinishReason.LENGTH))
    (choice,) = (await post(edge, TEXT_PATH, ECHO))["choices"]
    prompt, answer = edge.generator.calls[0].prompt_token_ids, encode("lazy")
    assert choice["text"] == "Hello worldlazy"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [described(token_id) for token_id in (*prompt, *answer)]
    of_prompt = [None, *(-place / 8 for place in range(1, len(prompt)))]
    assert logprobs["token_logprobs"] == [*of_prompt, *(-0.5 for _ in answer)]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {
        described(prompt[1]): -1 / 8,
        described(prompt[1] + 1): -1 / 8 - 1,
    }
    # The first token is a special one without text.
    for text_offset, token in zip(logprobs["text_offset"][1:], logprobs["tokens"][1:], strict=True):
        assert choice["text"][text_offset:].startswith(token)
    assert logprobs["text_offset"][:2] == [0, 0]


async def test_offsets_of_parts_of_characters_and_of_a_decoded_prompt() -> None:
    edge = make_edge(says("lazy", FinishReason.LENGTH))
    ids = list(encode("a é漢 z"))
    (choice,) = (await post(edge, TEXT_PATH, ECHO | {"prompt": ids}))["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[: len(ids)] == [
        len(MODEL.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))
    ]
    assert offsets[len(ids)] == len("a é漢 z")


@pytest.mark.covers("T37")
async def test_a_streamed_echo_adds_up_to_the_whole_one() -> None:
    (whole,) = (await post(make_edge(says("lazy", size=2)), TEXT_PATH, ECHO))["choices"]
    async with make_edge(says("lazy", size=2)).client() as client:
        response = await client.post(TEXT_PATH, json=ECHO | {"stream": True})
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values


async def test_a_prompt_of_one_token_has_null_alone() -> None:
    body = ECHO | {"prompt": [5], "max_tokens": 0, "prompt_logprobs": 1}
    (choice,) = (await post(make_edge(says("lazy")), TEXT_PATH, body))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert choice["prompt_logprobs"] == [None]


async def test_offsets_behind_control_tokens_of_a_text() -> None:
    text = "<|im_start|>user\nHello é<|im_end|>\n"
    edge = make_edge(says("lazy"), model=hermes_model())
    (choice,) = (await post(edge, TEXT_PATH, ECHO | {"prompt": text}))["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    first = tokens.index("<|im_start|>")
    assert offsets[first : first + 2] == [0, len("<|im_start|>")]
    end = tokens.index("<|im_end|>")
    assert offsets[end : end + 2] == [text.index("<|im_end|>"), len(text) - 1]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 0}, "max_tokens"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_fields_that_an_api_does_not_have_are_not_named(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with make_edge(says("lazy")).client() as client:
        response = await client.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{param} is 0: wanted at least 1"


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
async def test_nothing_is_generated_with_max_tokens_0(finish: FinishReason) -> None:
    text = "l" if finish is FinishReason.LENGTH else ""
    edge = make_edge(says(text, finish))
    answer = await post(edge, TEXT_PATH, ECHO | {"max_tokens": 0, "return_token_ids": True})
    (call,), (choice,) = edge.generator.calls, answer["choices"]
    assert call.sampling.max_tokens == 1
    assert (choice["text"], choice["finish_reason"]) == ("Hello world", "length")
    assert len(choice["logprobs"]["tokens"]) == len(call.prompt_token_ids)
    assert (choice["token_ids"], choice["stop_reason"]) == ([], None)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == len(call.prompt_token_ids)


async def test_a_chat_whose_prompt_alone_is_asked_for() -> None:
    edge = make_edge(says("l", FinishReason.LENGTH))
    answer = await post(edge, CHAT_PATH, CHAT | {"max_tokens": 0, "prompt_logprobs": 0})
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def expected(call: Call, num_top: int) -> list[Any]:
    """The list of `prompt_logprobs` in vLLM's shape."""
    found: list[Any] = [None]
    for place, token_id in enumerate(call.prompt_token_ids[1:], 1):
        of_token = {}
        for k in range(max(num_top, 1)):
            of_token[str(token_id + k)] = {
                "logprob": -place / 8 - k,
                "rank": k + 1,
                "decoded_token": described(token_id + k),
            }
        found.append(of_token)
    return found


@pytest.mark.parametrize("num_top", [0, 1, 3])
async def test_prompt_logprobs_of_a_completion_are_in_each_choice(num_top: int) -> None:
    edge = make_edge(says("lazy"))
    body = TEXT | {"prompt": ["Hello", "a dog"], "prompt_logprobs": num_top}
    choices = (await post(edge, TEXT_PATH, body))["choices"]
    for call, choice in zip(edge.generator.calls, choices, strict=True):
        assert choice["prompt_logprobs"] == expected(call, num_top)
        assert (choice["text"], choice["logprobs"]) == ("lazy", None)


async def test_prompt_logprobs_of_a_chat_are_found_and_shown_once() -> None:
    edge = make_edge(says("lazy"))
    answer = await post(edge, CHAT_PATH, CHAT | {"prompt_logprobs": 2, "n": 3})
    assert answer["prompt_logprobs"] == expected(edge.generator.calls[0], 2)
    asked = [call.sampling.prompt_logprobs for call in edge.generator.calls]
    assert asked == [2, None, None]
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_an_echo_and_prompt_logprobs_have_their_own_numbers() -> None:
    edge = make_edge(says("lazy"))
    body = ECHO | {"logprobs": 1, "prompt_logprobs": 3}
    (choice,) = (await post(edge, TEXT_PATH, body))["choices"]
    assert [call.sampling.prompt_logprobs for call in edge.generator.calls] == [3]
    assert choice["prompt_logprobs"] == expected(edge.generator.calls[0], 3)
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


async def test_the_prompt_does_not_change_which_choice_is_the_best() -> None:
    answers = []
    for echo in (False, True):
        edge = make_edge(says("lazy"))
        body = TEXT | {"echo": echo, "logprobs": 1, "best_of": 3, "n": 1}
        (choice,) = (await post(edge, TEXT_PATH, body))["choices"]
        answers.append(choice["text"])
    assert answers == ["lazy", "Hilazy"]


async def test_what_is_not_asked_for_is_neither_found_nor_shown() -> None:
    edge = make_edge(says("lazy"))
    answer = await post(edge, TEXT_PATH, TEXT | {"echo": True, "prompt_logprobs": None})
    assert edge.generator.calls[0].sampling.prompt_logprobs is None
    assert "prompt_logprobs" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (TEXT_PATH, {"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
        (CHAT_PATH, {"prompt_logprobs": -1}, "prompt_logprobs", "0 to 20"),
        (CHAT_PATH, {"prompt_logprobs": True}, "prompt_logprobs", "valid integer"),
        (TEXT_PATH, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "streamed"),
        (TEXT_PATH, {"max_tokens": 0}, "max_tokens", "0 with echo or prompt_logprobs"),
        (TEXT_PATH, {"max_tokens": -2, "echo": True}, "max_tokens", "wanted at least 1"),
        (TEXT_PATH, {"max_tokens": 0, "logprobs": 1}, "max_tokens", "0 with echo"),
        (
            CHAT_PATH,
            {"max_completion_tokens": 0},
            "max_completion_tokens",
            "wanted at least 1, or 0 with prompt_logprobs",
        ),
        (TEXT_PATH, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "wanted 0"),
        (
            TEXT_PATH,
            {"prompt": ["a" * (CONTEXT - 2)] * 128, "prompt_logprobs": 20},
            "prompt_logprobs",
            "at most 100000",
        ),
        (
            TEXT_PATH,
            {"prompt": ["a" * (CONTEXT - 2)] * 128, "logprobs": 20, "echo": True}
            | {"prompt_logprobs": 1},
            "logprobs",
            "at most 100000",
        ),
    ],
)
async def test_what_cannot_be_answered_is_refused(
    path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    edge = make_edge(says("lazy"))
    async with edge.client() as client:
        response = await client.post(path, json=(CHAT if path == CHAT_PATH else TEXT) | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not edge.generator.calls
