"""The range that a refusal tells is the one that is served: both bounds are, what is beyond is not.

The fields are those of the bodies that hold a number; the bounds are read from the refusals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from router.api.bodies.schemas import ChatBody, CompletionBody
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says

USER = [{"role": "user", "content": "Hi"}]
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": USER, "max_tokens": 8},
    TEXTS: {"prompt": "Hi", "max_tokens": 8},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 8},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
}
BESIDE = {"top_logprobs": {"logprobs": True}}
FAR = 10**20
_FROM_TO = re.compile(r"wanted (-?[\d.^ -]+?) to (-?[\d.^]+(?: - 1)?)")
_AT_LEAST = re.compile(r"wanted (?:at least )?(-?\d+)(?: or more)?\b")
_LIMITED_ELSEWHERE = {"max_tokens", "max_completion_tokens", "best_of"}
"""Those whose bounds follow from the prompt, or from other fields."""


def numeric_fields(model: type[ChatBody | CompletionBody]) -> Iterator[tuple[str, type]]:
    for name, one in model.model_fields.items():
        kinds: tuple[Any, ...] = get_args(one.annotation)
        kind = next((kind for kind in kinds if kind in (int, float)), None)
        if kind is not None:
            yield name, kind


CASES = [
    *((CHATS, name, kind) for name, kind in numeric_fields(ChatBody)),
    *((TEXTS, name, kind) for name, kind in numeric_fields(CompletionBody)),
    *(
        (path, name, kind)
        for path, names in {
            "/v1/responses": ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
            "/v1/messages": ("temperature", "top_p", "top_k"),
        }.items()
        for name, kind in numeric_fields(ChatBody)
        if name in (*names, "seed", "priority", "min_tokens", "truncate_prompt_tokens")
    ),
]


async def answer(path: str, name: str, value: float) -> tuple[int, str]:
    body = BODIES[path] | BESIDE.get(name, {}) | {name: value}
    edge = make_edge(says("Hello"), strict_fields=True)
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    return reply.status_code, reply.text


def number(told: str, kind: type) -> float:
    """Return the number of a bound such as `0.01`, `-2` or `2^64 - 1`."""
    if "^" not in told:
        return float(told) if kind is float else int(told)
    power, _, less = told.partition(" - ")
    base, _, exponent = power.lstrip("-").partition("^")
    value: int = int(base) ** int(exponent) - int(less or 0)
    return -value if told.startswith("-") else value


@pytest.mark.parametrize(("path", "name", "kind"), CASES)
async def test_bounds_that_are_told_are_served_and_no_others(
    path: str, name: str, kind: type
) -> None:
    status, below = await answer(path, name, kind(-FAR))
    assert status == 400, below
    if name in _LIMITED_ELSEWHERE:
        return
    step = 1 if kind is int else 1e-6
    if found := _FROM_TO.search(below):
        least, most = (number(told, kind) for told in found.groups())
        assert (await answer(path, name, most))[0] == 200
        status, above = await answer(path, name, most + step)
        assert status == 400
        assert found[0] in above
    else:
        found = _AT_LEAST.search(below)
        assert found, below
        least = number(found[1], kind)
    assert (await answer(path, name, least))[0] == 200
    status, beyond = await answer(path, name, least - step)
    assert status == 400
    assert found[0] in beyond
