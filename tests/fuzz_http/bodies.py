"""Bodies of every endpoint: valid ones, and valid ones with changes."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzz_http.grammars import any_gbnf, any_lark, any_regex, known_hostile
from tests.fuzz_http.schemas import any_schema, likely_schema
from tests.fuzz_http.values import NUMBERS, any_text, any_value, as_json, changed

Fields = dict[str, Any]

POSTED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/tokenize", "/detokenize", "/v1/cluster/drain", "/v1/cluster/role"),
)
MOST_BYTES = 11 << 20
"""A router takes 10 MiB."""
_FIELDS = {"JSON_SCHEMA": "json", "REGEX": "regex", "LARK": "grammar"}
_WORDS = (
    "Hi",
    "Tell me",
    "one two three",
    "é",
    "Once upon a time ",
    "x" * 60,
    "<tool_call>",
    "[a] b",
)
_SAMPLING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("n", (1, 2, 3)),
    ("temperature", (0, 0.5, 1, 2, 1e-9)),
    ("top_p", (0.1, 0.9, 1)),
    ("top_k", (-1, 0, 1, 5, 1000)),
    ("min_p", (0, 0.1, 1)),
    ("seed", (0, 1, -1, 2**63 - 1)),
    ("presence_penalty", (-2, 0, 2)),
    ("frequency_penalty", (-2, 0, 2)),
    ("repetition_penalty", (0.5, 1, 2)),
    ("stop", ("a", ["b", "c"], [], "\n", ["é", ""])),
    ("stop_token_ids", ([], [5], [0, 129])),
    ("ignore_eos", (True, False)),
    ("min_tokens", (0, 1, 5)),
    ("logit_bias", ({}, {"5": 100}, {"5": -100, "129": 1}, {"130": 1}, {"x": 0})),
    ("bad_words", (["a"], [""], ["ab", "é"])),
    ("allowed_token_ids", ([5], [5, 6, 7], [], [130])),
    ("prompt_logprobs", (0, 1, 20)),
    ("truncate_prompt_tokens", (1, 5, 0)),
    ("skip_special_tokens", (True, False)),
    ("include_stop_str_in_output", (True, False)),
    ("return_token_ids", (True, False)),
    ("stream_options", ({"include_usage": True}, {"continuous_usage_stats": True}, {}, None)),
    ("priority", (0, 1, -1000, 1000, 1001)),
    ("cache_salt", ("a", "", "é")),
    ("user", ("a", None)),
    ("metadata", ({}, {"a": "b"})),
)


def any_body(rng: random.Random, path: str) -> bytes:
    """Return a body for the endpoint at `path`; half of them are valid, nearly all are JSON."""
    where = rng.random()
    if where < 0.03:
        return as_json(rng, any_value(rng))
    if where < 0.05:
        return rng.randbytes(rng.choice((0, 1, 100, 5000)))
    fields = valid_fields(rng, path)
    if where > 0.5:
        fields = changed(rng, fields, rng.choice((1, 1, 2, 3, 6)))
    body = as_json(rng, fields)
    if where < 0.1 and body:
        at = rng.randrange(len(body))
        body = rng.choice((body[:at], body[:at] + rng.randbytes(2) + body[at + 1 :], body * 2))
    if rng.random() < 0.03:
        body = (
            rng.choice((b"\xef\xbb\xbf", b" " * rng.choice((200_000, MOST_BYTES)), b"\n", b"\x00"))
            + body
        )
    return body[:MOST_BYTES]


def valid_fields(rng: random.Random, path: str) -> Fields:
    """Return the fields of a request that is answered, if its grammar is."""
    match path:
        case "/v1/completions":
            return _completion(rng)
        case "/v1/chat/completions":
            return _chat(rng)
        case "/v1/responses":
            return _response(rng)
        case "/v1/messages":
            return _message(rng)
        case "/tokenize":
            chat = {"messages": _turns(rng), "add_generation_prompt": True}
            return rng.choice(({"prompt": rng.choice(_WORDS)}, chat, {"prompt": [5, 6]}))
        case "/detokenize":
            return {"tokens": [rng.randrange(130) for _ in range(rng.randrange(40))]}
    return {"node_id": rng.choice(("nobody", "", "decode-9", any_text(rng)))}


def _sampling(rng: random.Random) -> Fields:
    fields: Fields = {"max_tokens": rng.choice((0, 1, 2, 8, 20, 40)), "stream": rng.random() < 0.4}
    if rng.random() < 0.5:
        fields["model"] = "tiny"
    for name, values in rng.sample(_SAMPLING, rng.choice((0, 0, 1, 2, 4))):
        fields[name] = rng.choice(values)
    return fields


def _completion(rng: random.Random) -> Fields:
    prompts = (rng.choice(_WORDS), [rng.choice(_WORDS)] * 2, [5, 6, 7], [[5], [6, 7]], "x" * 900)
    fields = _sampling(rng) | {"prompt": rng.choice(prompts)}
    own = {"logprobs": (0, 1, 20), "echo": (True, False), "best_of": (1, 3, 5)}
    for name, values in own.items():
        if rng.random() < 0.2:
            fields[name] = rng.choice(values)
    return fields | (_constraint(rng) if rng.random() < 0.5 else {})


def _chat(rng: random.Random) -> Fields:
    fields = _sampling(rng) | {"messages": _turns(rng)}
    if rng.random() < 0.25:
        fields |= {"logprobs": True, "top_logprobs": rng.choice((0, 1, 20))}
    if rng.random() < 0.1:
        fields["chat_template_kwargs"] = {rng.choice(("enable_thinking", "messages", "a")): True}
    if rng.random() < 0.1:
        fields["reasoning_effort"] = rng.choice(("low", "none", ""))
    if rng.random() < 0.1:
        fields["thinking_token_budget"] = rng.choice((0, 3, -1, -2))
    if rng.random() < 0.45:
        fields["tools"] = [_tool(rng, number) for number in range(rng.choice((1, 1, 2, 5)))]
        named = {"type": "function", "function": {"name": "f0"}}
        allowed = {"mode": "required", "tools": [named]}
        fields["tool_choice"] = rng.choice(
            ("auto", "required", "none", named, {"type": "allowed_tools", "allowed_tools": allowed})
        )
        if rng.random() < 0.3:
            fields["parallel_tool_calls"] = rng.random() < 0.5
    if rng.random() < 0.35:
        fields |= _constraint(rng)
    return fields


def _tool(rng: random.Random, number: int) -> Fields:
    function: Fields = {"name": f"f{number}", "description": rng.choice(("", "A tool", "é{{"))}
    if rng.random() < 0.9:
        schema = any_schema(rng) if rng.random() < 0.4 else likely_schema(rng)
        function["parameters"] = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        if rng.random() < 0.2:
            function["parameters"] = schema
    if rng.random() < 0.4:
        function["strict"] = rng.random() < 0.7
    return {"type": "function", "function": function}


def _turns(rng: random.Random) -> list[Fields]:
    call = {"id": "c1", "type": "function", "function": {"name": "f0", "arguments": '{"a": 1}'}}
    turns: list[Fields] = [{"role": "system", "content": rng.choice(_WORDS)}]
    turns = turns[: rng.randrange(2)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        text = rng.choice(_WORDS)
        content: Any = [{"type": "text", "text": text}] if rng.random() < 0.3 else text
        turns.append({"role": "user", "content": content})
        if rng.random() < 0.2:
            turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
            turns.append({"role": "tool", "tool_call_id": "c1", "content": text})
        elif rng.random() < 0.3:
            turns.append({"role": "assistant", "content": text, "reasoning_content": text})
    return turns


def _response(rng: random.Random) -> Fields:
    turns: list[Fields] = [{"role": "user", "content": rng.choice(_WORDS)}]
    if rng.random() < 0.3:
        call = {"call_id": "c1", "name": "f0", "arguments": "{}"}
        turns += [
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": "c1", "output": rng.choice(_WORDS)},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        ]
    fields: Fields = {
        "input": rng.choice((rng.choice(_WORDS), turns)),
        "max_output_tokens": rng.choice((1, 5, 30)),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        fields["instructions"] = rng.choice(_WORDS)
    if rng.random() < 0.3:
        schema = any_schema(rng) if rng.random() < 0.5 else likely_schema(rng)
        fields["text"] = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    if rng.random() < 0.3:
        fields["tools"] = [{"type": "function", **_tool(rng, 0)["function"]}]
        fields["tool_choice"] = rng.choice(("auto", "required", {"type": "function", "name": "f0"}))
    if rng.random() < 0.2:
        fields["reasoning"] = rng.choice(({"effort": "low"}, {"summary": "auto"}, {}))
    return fields


def _message(rng: random.Random) -> Fields:
    content = rng.choice((rng.choice(_WORDS), [{"type": "text", "text": rng.choice(_WORDS)}]))
    turns: list[Fields] = [{"role": "user", "content": content}]
    if rng.random() < 0.3:
        use = {"type": "tool_use", "id": "c1", "name": "f0", "input": {"a": 1}}
        thought = {"type": "thinking", "thinking": "a", "signature": ""}
        turns += [
            {"role": "assistant", "content": [thought, use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "b"}],
            },
        ]
    fields: Fields = {"messages": turns, "max_tokens": rng.choice((1, 5, 30))}
    fields["stream"] = rng.random() < 0.5
    if rng.random() < 0.3:
        fields["system"] = rng.choice(("a", [{"type": "text", "text": "a"}]))
    if rng.random() < 0.3:
        function = _tool(rng, 0)["function"]
        schema = function.get("parameters", {})
        fields["tools"] = [{"name": function["name"], "input_schema": schema}]
        fields["tool_choice"] = rng.choice(
            ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f0"}, {"type": "none"})
        )
    if rng.random() < 0.2:
        schema = any_schema(rng) if rng.random() < 0.5 else likely_schema(rng)
        fields["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if rng.random() < 0.2:
        fields["thinking"] = rng.choice(({"type": "enabled", "budget_tokens": 1024}, {"type": "x"}))
    if rng.random() < 0.2:
        fields["stop_sequences"] = rng.choice((["a"], [""], [rng.choice(NUMBERS[:20])]))
    return fields


def _constraint(rng: random.Random) -> Fields:
    """Return the fields that constrain an answer, by each of the ways to ask for it."""
    schema = likely_schema(rng) if rng.random() < 0.35 else any_schema(rng)
    text: Any = json.dumps(schema, default=str)
    named = {"name": "s", "schema": schema, "strict": rng.random() < 0.5}
    lark, gbnf, regex = any_lark(rng, schema), any_gbnf(rng), any_regex(rng)
    ways: tuple[Fields, ...] = (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": ["a", "b", any_text(rng)[:500]]}},
        {"guided_choice": [any_text(rng)[:100], "b"]},
        {"guided_json": rng.choice((schema, text))},
        {"json_schema": text},
        *({name: regex} for name in ("guided_regex", "regex")),
        {"structured_outputs": {"regex": regex}},
        *({name: one} for name in ("guided_grammar", "ebnf") for one in (lark, gbnf)),
        *({"structured_outputs": {"grammar": one}} for one in (lark, gbnf, lark)),
    )
    if rng.random() < 0.03:
        kind, hostile = known_hostile(rng)
        return {"structured_outputs": {_FIELDS[kind]: hostile}}
    return rng.choice(ways)
