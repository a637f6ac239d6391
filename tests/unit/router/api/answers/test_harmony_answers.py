"""Answers of a model that writes messages to channels, on every API, streamed and whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from common.request import FinishReason
from tests.support.examples import everyday
from tests.support.http.harmony_model import harmony_model
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import chunks, plays
from tests.support.http.tool_models import NOW, WEATHER
from tests.unit.router.api.answers.streamed_parts import APIS, Api, Part, grouped, joined

NUM_GROUPINGS = everyday(10, of=60)
CITY = '{"city": "Zürich 🌞"}'
THOUGHT = "It is <b>Zürich</b> 🏔, so"
NEXT = "<|end|><|start|>assistant"
ANSWER = (
    f"<|channel|>analysis<|message|>{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look 🌞 now."
    f"{NEXT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}{NEXT}"
    " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)
THINKING = ("thinking", THOUGHT)
CALLS = [("get_weather", CITY), ("now", "{}")]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
FINAL = "<|channel|>final<|message|>"


def ids_of(text: str) -> list[int]:
    return list(harmony_model().spelt(text))


async def answers(
    text: str, body: dict[str, Any], finish: FinishReason = FinishReason.STOP, of: Any = None
) -> list[Any]:
    """The choices of a whole chat, after they are compared with those of a stream."""
    model = of or harmony_model()
    edge = make_edge(plays(chunks(list(model.spelt(text)), finish, size=3)), model=model)
    async with edge.client() as client:
        whole = await client.post("/v1/chat/completions", json=body)
        streamed = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text + streamed.text
    choices: list[Any] = whole.json()["choices"]
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    for number, choice in enumerate(choices):
        of_choice = [one for line in lines for one in json.loads(line)["choices"]]
        deltas = [one["delta"] for one in of_choice if one["index"] == number]
        for name in ("content", "reasoning_content"):
            said = "".join(one.get(name) or "" for one in deltas)
            assert said == (choice["message"].get(name) or "")
    assert "<|" not in json.dumps(choices)
    return choices


async def answer(text: str, body: dict[str, Any], finish: Any = FinishReason.STOP) -> Any:
    (choice,) = await answers(text, body, finish)
    return choice


@pytest.mark.covers("G14", "G15", "T04", "G20", "T47")
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@pytest.mark.parametrize(
    ("stop", "is_stopped", "wanted"),
    [
        (["🌞 now!", "Zürich", "commentary"], False, [("text", "I look 🌞 now."), *CALLS]),
        (["🌞 now"], True, [("text", "I look ")]),
    ],
    ids=["a stop string that is in no text", "a stop string"],
)
async def test_any_groups_of_tokens_stream_the_same_answer_in_harmony(
    api: Api, stop: list[str], is_stopped: bool, wanted: list[Part]
) -> None:
    model = harmony_model()
    token_ids = ids_of(ANSWER)
    for seed in range(NUM_GROUPINGS):
        edge = make_edge(plays(grouped(token_ids, random.Random(seed))), model=model)
        body = api.body | {"stream": True, api.stop_field: stop}
        async with edge.client() as client:
            response = await client.post(api.path, json=body)
        assert response.status_code == 200, response.text
        *parts, (end, _) = joined(api, response.text)
        assert parts == [THINKING, *wanted], f"grouping {seed}"
        assert end == api.ends[is_stopped], f"grouping {seed}"


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_a_whole_answer_has_its_thinking_its_text_and_its_calls(api: Api) -> None:
    edge = make_edge(plays(chunks(ids_of(ANSWER), FinishReason.STOP)), model=harmony_model())
    async with edge.client() as client:
        response = await client.post(api.path, json=api.body)
    assert response.status_code == 200, response.text
    shown = json.dumps(response.json(), ensure_ascii=False)
    for text in (THOUGHT, "I look 🌞 now.", "get_weather", "Zürich 🌞"):
        assert text in shown
    assert "<|" not in shown
    assert "assistant<" not in shown


async def test_the_end_of_a_message_is_not_that_of_an_answer() -> None:
    model = harmony_model()
    ends = {model.tokenizer.token_to_id(name) for name in ("<|return|>", "<|call|>")}
    assert ends < model.eos_token_ids
    assert model.tokenizer.token_to_id("<|end|>") not in model.eos_token_ids


async def test_a_chat_without_tools_has_thinking_and_text() -> None:
    text = f"<|channel|>analysis<|message|>Hm.{NEXT}{FINAL}Hello<|return|>"
    choice = await answer(text, CHAT)
    assert choice["finish_reason"] == "stop"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello", "Hm.")
    hidden = await answer(text, CHAT | {"include_reasoning": False})
    assert "reasoning_content" not in hidden["message"]


async def test_a_tag_that_is_spelled_is_text() -> None:
    spelled = "Tags: <|channel|>final<|message|> and <|end|>."
    model = harmony_model()
    pieces = [i for char in spelled for i in model.spelt(char)]
    token_ids = [*ids_of(FINAL), *pieces]
    edge = make_edge(plays(chunks(token_ids, FinishReason.STOP)), model=model)
    async with edge.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.json()["choices"][0]["message"]["content"] == spelled


@pytest.mark.covers("T47")
@pytest.mark.parametrize("shown", [False, True])
async def test_no_field_shows_a_tag(shown: bool) -> None:
    fields = {"include_stop_str_in_output": True, "skip_special_tokens": not shown}
    choice = await answer(f"{FINAL}Hello<|return|>", CHAT | fields)
    assert choice["message"]["content"] == "Hello"
    ignored = CHAT | fields | {"ignore_eos": True}
    choice = await answer(f"{FINAL}Hello<|return|> you", ignored, FinishReason.LENGTH)
    assert choice["message"]["content"] == "Hello\n\n you"


@pytest.mark.covers("T46")
@pytest.mark.parametrize(
    ("cut", "thought", "content"),
    [
        ("<|channel|>ana", None, ""),
        (f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>fi", "Hm.", ""),
        (f"<|channel|>analysis<|message|>Hm.{NEXT} to=functions.no", "Hm.", ""),
        (f"{FINAL}Hel", None, "Hel"),
    ],
)
async def test_a_header_that_is_cut_off_is_not_shown(
    cut: str, thought: str | None, content: str
) -> None:
    choice = await answer(cut, CHAT, FinishReason.LENGTH)
    assert choice["finish_reason"] == "length"
    message = choice["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, thought)


async def test_a_call_that_is_cut_off_is_no_call_to_run() -> None:
    cut = '<|channel|>commentary to=functions.now<|message|>{"a": '
    body = CHAT | {"tools": [NOW]}
    for finish in (FinishReason.LENGTH, FinishReason.STOP):
        choice = await answer(cut, body, finish)
        assert choice["finish_reason"] == finish.value
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.covers("T47")
async def test_calls_are_told_by_the_end_of_an_answer() -> None:
    call = "<|channel|>analysis to=functions.now code<|message|>{}<|call|>"
    choice = await answer(call, CHAT | {"tools": [NOW]})
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    named = {"tool_choice": {"type": "function", "function": {"name": "now"}}}
    choice = await answer(call, CHAT | {"tools": [NOW]} | named)
    assert choice["finish_reason"] == "stop"
    # A tool that the request does not have is none to run.
    choice = await answer(call, CHAT | {"tools": [WEATHER]})
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("stop", "{}")


async def test_several_choices_are_read_apart() -> None:
    choices = await answers(f"{FINAL}Hello<|return|>", CHAT | {"n": 3})
    assert [one["message"]["content"] for one in choices] == ["Hello"] * 3


async def test_stop_strings_are_searched_in_each_text_alone() -> None:
    text = f"<|channel|>commentary<|message|>one two{NEXT}{FINAL}three<|return|>"
    for stop, wanted in (
        ("two\n", "one two\n\nthree"),
        ("twothree", "one two\n\nthree"),
        ("final", "one two\n\nthree"),
        ("<|end|>", "one two\n\nthree"),
        (" two", "one"),
        ("hre", "one two\n\nt"),
    ):
        choice = await answer(text, CHAT | {"stop": stop})
        assert choice["message"]["content"] == wanted, stop
        assert choice["stop_reason"] == (stop if wanted != "one two\n\nthree" else None)
    header = {"min_tokens": len(ids_of("<|channel|>commentary<|message|>"))}
    assert (await answer(text, CHAT | header | {"stop": " two"}))["message"]["content"] == "one"
    late = CHAT | {"stop": " two", "min_tokens": 30}
    assert (await answer(text, late))["message"]["content"] == "one two\n\nthree"


async def test_each_token_has_its_log_probability_once() -> None:
    token_ids = ids_of(ANSWER)
    found = []
    for seed in range(4):
        edge = make_edge(plays(grouped(token_ids, random.Random(seed))), model=harmony_model())
        body = APIS[0].body | {"stream": seed > 0, "logprobs": True}
        async with edge.client() as client:
            response = await client.post("/v1/chat/completions", json=body)
        texts = [response.text] if seed == 0 else response.text.split("\n\n")[:-2]
        choices = [json.loads(text.removeprefix("data: "))["choices"][0] for text in texts]
        scored = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        found.append([entry["logprob"] for entries in scored for entry in entries])
    assert found == found[:1] * 4
    assert found[0] == [-1.0 - place for place in range(len(token_ids) - 1)], "but for the end"


async def test_tokens_of_thinking_are_counted() -> None:
    text = f"<|channel|>analysis<|message|>Hm.{NEXT}{FINAL}Hello<|return|>"
    wanted = len(ids_of("<|channel|>analysis<|message|>Hm.<|end|>"))
    for size in (1, 4):
        edge = make_edge(
            plays(chunks(ids_of(text), FinishReason.STOP, size=size)), model=harmony_model()
        )
        async with edge.client() as client:
            response = await client.post("/v1/chat/completions", json=CHAT)
        details = response.json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == wanted


async def test_a_completion_is_text_without_tags() -> None:
    edge = make_edge(
        plays(chunks(ids_of(f"{FINAL}Hello<|return|>"), FinishReason.STOP)), model=harmony_model()
    )
    async with edge.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "Hi", "echo": True})
    assert response.json()["choices"][0]["text"] == "HifinalHello"


@pytest.mark.parametrize("api", APIS[1:], ids=lambda api: api.path)
async def test_messages_are_items_of_their_own_where_others_are_between(api: Api) -> None:
    thought = f"<|channel|>analysis<|message|>Hm.{NEXT}"
    remark = "<|channel|>commentary<|message|>I look."
    text = f"{thought}{thought}{remark}{NEXT}{thought}{FINAL}So.<|return|>"
    edge = make_edge(plays(chunks(ids_of(text), FinishReason.STOP)), model=harmony_model())
    async with edge.client() as client:
        response = await client.post(api.path, json=api.body | {"stream": True})
    *parts, _ = joined(api, response.text)
    thoughts = [("thinking", "Hm.\n\nHm."), ("thinking", "Hm.")]
    assert parts == [thoughts[0], ("text", "I look."), thoughts[1], ("text", "So.")]
