"""Fields about single tokens, from the body to what is asked of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from common.token_rules import NO_RULES, TokenRules
from router.api.prefix_sharing import PrefixSharing
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import Call

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


async def asked(path: str, **fields: Any) -> Call:
    edge = make_edge()
    async with edge.client() as client:
        reply = await client.post(path, json=PATHS[path] | fields)
    assert reply.status_code == 200, reply.text
    (call,) = edge.generator.calls
    return call


@pytest.mark.parametrize("path", PATHS)
async def test_rules_reach_the_nodes(path: str) -> None:
    fields = {"logit_bias": {"7": -100, "5": 1.5}, "allowed_token_ids": [7, 5, 9]}
    call = await asked(path, **fields, cache_salt="mine")
    assert call.sampling.rules == TokenRules(
        biases=((5, 1.5), (7, -100.0)), allowed_token_ids=(7, 5, 9)
    )
    assert call.cache_salt == PrefixSharing.KEY.salt("", "mine")


@pytest.mark.parametrize("path", PATHS)
async def test_values_that_ask_for_nothing_are_no_rules(path: str) -> None:
    call = await asked(path, logit_bias={}, bad_words=[], allowed_token_ids=None, cache_salt=None)
    assert call.sampling.rules == NO_RULES
    assert call.cache_salt == ""


async def test_a_bad_word_is_spelt_with_and_without_a_space() -> None:
    model = tiny_model()
    call = await asked("/v1/completions", bad_words=["dog", " fox", "dog"])
    words = call.sampling.rules.bad_words
    assert len(words) == len(set(words))
    texts = [model.decode(word) for word in words]
    for word in ("dog", "fox"):
        assert word in texts
        alone, behind = (
            model.encode(text, add_special_tokens=False, param="text")
            for text in (word, f" {word}")
        )
        is_spelt_alike = len(alone) == len(behind) and alone[0] != behind[0]
        assert (behind in words) == is_spelt_alike


@pytest.mark.parametrize("word", ["\ue000999\ue001", "\ue0000\ue001", "\ue000"])
async def test_a_bad_word_of_private_characters_is_text(word: str) -> None:
    """The server marks special tokens in its own text with them."""
    call = await asked("/v1/completions", bad_words=[word])
    assert tiny_model().decode(call.sampling.rules.bad_words[0]) == word


async def test_a_bad_word_may_be_a_special_token() -> None:
    call = await asked("/v1/completions", bad_words=["<|im_end|>"])
    (token_id,) = call.sampling.rules.bad_words[0]
    assert tiny_model().decode([token_id], with_special_tokens=True) == "<|im_end|>"


async def test_a_grammar_and_words_do_not_go_together() -> None:
    edge = make_edge()
    body = {"prompt": "Hi", "guided_regex": "a+", "bad_words": ["x"]}
    async with edge.client() as client:
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "bad_words"
    assert not edge.generator.calls


async def test_an_answer_that_a_stop_string_may_end_needs_no_other_end() -> None:
    one = tiny_model().spelt("a")
    assert len(one) == 1
    rules = {"allowed_token_ids": list(one), "bad_words": ["aa"], "max_tokens": 9}
    call = await asked("/v1/completions", stop="a", **rules)
    assert call.sampling.rules.allowed_token_ids == one
    async with make_edge().client() as client:
        reply = await client.post("/v1/completions", json={"prompt": "Hi"} | rules)
    assert reply.status_code == 400
