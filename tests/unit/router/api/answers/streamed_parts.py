"""Streams of every API: tokens in random groups, and the parts to which their deltas join."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from common.request import FinishReason, TokenLogprobs
from router.core.generation import TokenChunk
from tests.support.http.tool_models import NOW, WEATHER

SIZES = (1, 1, 1, 2, 3, 5, 12, 40)
FUNCTIONS = [WEATHER["function"], NOW["function"]]
Part = tuple[str, str]
"""What it is, or the function that is called; and its text or arguments."""


@dataclass(frozen=True, slots=True)
class Api:
    """A request for a stream with a stop string, and how to read its parts, piece by piece."""

    path: str
    body: dict[str, Any]
    stop_field: str
    ends: tuple[str, str]
    """What it says at the end of all calls, and at the stop string."""
    pieces_of: Callable[[dict[str, Any]], Iterator[tuple[int | str, str, str]]]
    """Yields the place of a part in the answer, what it is (`""`: as before) and a piece of it."""


def chat_pieces(event: dict[str, Any]) -> Iterator[tuple[int | str, str, str]]:
    (choice,) = event["choices"]
    delta = choice["delta"]
    if "reasoning_content" in delta:
        yield "thinking", "thinking", delta["reasoning_content"]
    if delta.get("content"):
        yield "text", "text", delta["content"]
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        yield call["index"], function.get("name", ""), function["arguments"]
    if choice["finish_reason"]:
        yield "end", choice["finish_reason"], ""


def response_pieces(event: dict[str, Any]) -> Iterator[tuple[int | str, str, str]]:
    match event["type"]:
        case "response.reasoning_text.delta":
            yield event["output_index"], "thinking", event["delta"]
        case "response.output_text.delta":
            yield event["output_index"], "text", event["delta"]
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            yield event["output_index"], event["item"]["name"], event["item"]["arguments"]
        case "response.function_call_arguments.delta":
            yield event["output_index"], "", event["delta"]
        case "response.completed":
            yield "end", event["response"]["status"], ""


def message_pieces(event: dict[str, Any]) -> Iterator[tuple[int | str, str, str]]:
    match event["type"]:
        case "content_block_start":
            block = event["content_block"]
            yield event["index"], block.get("name", block["type"]), ""
        case "content_block_delta":
            kind, piece = event["delta"].values()
            if kind != "signature_delta":
                yield event["index"], "", piece
        case "message_delta":
            yield "end", event["delta"]["stop_reason"], ""


QUESTION = [{"role": "user", "content": "Weather?"}]
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
APIS = [
    Api(
        "/v1/chat/completions",
        {"messages": QUESTION, "tools": [WEATHER, NOW], **THINKS},
        "stop",
        ("tool_calls", "stop"),
        chat_pieces,
    ),
    Api(
        "/v1/responses",
        {"input": "Weather?", "tools": [{"type": "function", **f} for f in FUNCTIONS], **THINKS},
        "stop",
        ("completed", "completed"),
        response_pieces,
    ),
    Api(
        "/v1/messages",
        {
            "max_tokens": 400,
            "messages": QUESTION,
            "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
            "thinking": {"type": "enabled", "budget_tokens": 99},
        },
        "stop_sequences",
        ("tool_use", "stop_sequence"),
        message_pieces,
    ),
]


def grouped(token_ids: list[int], rng: random.Random) -> list[TokenChunk]:
    """The tokens of an answer in groups of random sizes."""
    found, first = list[TokenChunk](), 0
    while first < len(token_ids):
        group = tuple(token_ids[first : first + rng.choice(SIZES)])
        is_last = first + len(group) == len(token_ids)
        finish = FinishReason.STOP if is_last else None
        scored = tuple(TokenLogprobs(-1.0 - first - place) for place in range(len(group)))
        found.append(TokenChunk(first, group, scored, finish))
        first += len(group)
    return found


def joined(api: Api, body: str) -> list[Part]:
    """The parts of an answer, in the order in which they began."""
    kinds: dict[int | str, str] = {}
    texts: dict[int | str, str] = {}
    for line in body.splitlines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        for place, kind, piece in api.pieces_of(json.loads(data)):
            kinds[place] = kind or kinds[place]
            texts[place] = texts.get(place, "") + piece
    return [(kinds[place], text) for place, text in texts.items()]
