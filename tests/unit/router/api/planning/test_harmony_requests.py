"""Requests to a model that writes messages to channels: what it is told, and what it must write."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import SamplingParams
from common.token_rules import ThinkingBudget
from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel
from router.tools.harmony.tags import HARMONY
from tests.support.http.harmony_model import HARMONY_TEMPLATE, harmony_model
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import NOW, WEATHER, function

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"messages": [ASKED], "max_tokens": 50}
START = "<|start|>assistant"
PARIS = {"city": "Paris"}


def call(number: int, name: str, arguments: str = '{"city": "Paris"}') -> dict[str, Any]:
    called = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": called}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


async def asked(
    body: dict[str, Any], path: str = CHAT, status: int = 200, of: TextModel | None = None
) -> Any:
    """The prompt and the sampling of a request that is taken, and the error of another one."""
    edge = make_edge(says("Hi"), model=of or harmony_model())
    async with edge.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    if status != 200:
        return response.json()["error"]
    (one,) = edge.generator.calls
    return edge.model.decode(one.prompt_token_ids, with_special_tokens=True), one.sampling


async def prompt_of(*messages: dict[str, Any], **fields: Any) -> str:
    prompt, _ = await asked(BODY | {"messages": list(messages), **fields})
    return str(prompt)


async def sampling_of(**fields: Any) -> SamplingParams:
    _, sampling = await asked(BODY | fields)
    assert isinstance(sampling, SamplingParams)
    return sampling


# --- what the model is told -----------------------------------------------------------------------


async def test_it_is_told_of_calls_what_it_wrote_and_in_what_order() -> None:
    called = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [call(1, "get_weather"), call(2, "now", "{}")],
    }
    prompt = await prompt_of(
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Write <|end|>."},
        called,
        result(2, "14:05"),
        result(1, "sunny"),
        {"role": "assistant", "content": "So.", "reasoning_content": "Left out."},
        ASKED,
        tools=[WEATHER, NOW],
    )
    assert prompt.endswith(
        "<|start|>user<|message|>Write <|end|>.<|end|>"
        f"{START}<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        f'{START} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Paris"}}'
        "<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
        '"sunny"<|end|>'
        f"{START} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>"
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"14:05"<|end|>'
        f"{START}<|channel|>final<|message|>So.<|end|>"
        f"<|start|>user<|message|>Hi<|end|>{START}"
    )
    assert "<|start|>developer<|message|>Be brief.\n\nBe kind.\n// The weather of a city" in prompt


async def test_a_text_before_a_call_stays_where_nothing_was_thought() -> None:
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call(1, "now", "{}")]}
    prompt = await prompt_of(ASKED, called, result(1, "14:05"))
    assert f"{START}<|channel|>analysis<|message|>I look.<|end|>{START} to=functions.now" in prompt


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_the_other_apis_tell_it_the_same(path: str) -> None:
    fields: dict[str, Any] = {"name": "get_weather"}
    if path == "/v1/messages":
        blocks = [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": PARIS},
        ]
        found = [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]
        body = {
            "max_tokens": 50,
            "messages": [
                ASKED,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": found},
            ],
            "tools": [fields | {"input_schema": WEATHER["function"]["parameters"]}],
        }
    else:
        body = {
            "input": [
                ASKED,
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {
                    "type": "function_call",
                    "call_id": "t1",
                    "name": "get_weather",
                    "arguments": '{"city": "Paris"}',
                },
                {"type": "function_call_output", "call_id": "t1", "output": "sunny"},
            ],
            "tools": [{"type": "function", **WEATHER["function"]}],
        }
    prompt, _ = await asked(body, path)
    assert prompt.endswith(
        f"{START}<|channel|>analysis<|message|>Hm.<|end|>{START} to=functions.get_weather"
        '<|channel|>commentary json<|message|>{"city": "Paris"}<|call|><|start|>'
        "functions.get_weather to=assistant<|channel|>commentary<|message|>"
        f'"sunny"<|end|>{START}'
    )


async def test_functions_without_descriptions_are_told_too() -> None:
    properties = {"a": True, "b": {"enum": [1], "default": 1}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    prompt = await prompt_of(ASKED, tools=[tool, {"type": "function", "function": {"name": "g"}}])
    assert "// \ntype f = (_: { // \na: any // \nb: any = 1}) => any;" in prompt
    assert "type g = (_: {}) => any;" in prompt


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning": {"effort": "low"}}, "low"),
        ({"reasoning_effort": "none"}, "low"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": None}}, "medium"),
        ({"enable_thinking": False}, "low"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"thinking_token_budget": 0}, "low"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "low"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "high"),
        ({"enable_thinking": True}, "medium"),
    ],
)
async def test_it_is_told_an_effort_that_it_knows(fields: dict[str, Any], told: str) -> None:
    assert f"Reasoning: {told}<|end|>" in await prompt_of(ASKED, **fields)


async def test_an_effort_of_responses() -> None:
    body = {"input": "Hi", "reasoning": {"effort": "high"}}
    prompt, _ = await asked(body, "/v1/responses")
    assert "Reasoning: high<|end|>" in prompt


async def test_a_turn_that_said_nothing_ends_no_thinking() -> None:
    """Agents send back what was thought before an answer that was cut off.

    Behind a text of `final` the published template leaves out what was thought before the calls.
    """
    called = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call(1, "now", "{}")]}
    silent = {"role": "assistant", "reasoning_content": "So", "content": None}
    prompt = await prompt_of(ASKED, called, result(1, "14:05"), silent)
    assert prompt.endswith(f'"14:05"<|end|>{START}')
    assert "final" not in prompt
    assert (await prompt_of(silent)).endswith(f"final<|message|><|end|>{START}")


@pytest.mark.parametrize("num_calls", [0, 1, 2])
@pytest.mark.parametrize("thought", [None, "Hm."])
async def test_a_continued_message_ends_with_its_text(num_calls: int, thought: str | None) -> None:
    begun: dict[str, Any] = {"role": "assistant", "content": "I l", "reasoning_content": thought}
    begun["tool_calls"] = [call(number, "now", "{}") for number in range(num_calls)]
    open_end = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = await prompt_of(ASKED, begun, **open_end)
    assert prompt.endswith(f"{START}<|channel|>final<|message|>I l")
    empty = {"role": "assistant", "content": ""}
    prompt = await prompt_of(ASKED, empty, **open_end)
    assert prompt.endswith(f"{START}<|channel|>final<|message|>")


async def test_a_result_without_a_call_is_refused() -> None:
    error = await asked(BODY | {"messages": [ASKED, result(1, "sunny")]}, status=400)
    assert "No call is before it." in error["message"]


def matcher_of(sampling: SamplingParams, model: TextModel) -> Any:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    assert sampling.grammar is not None
    text, ends = model.tokenizer.to_str(), sorted(model.eos_token_ids)
    tokenizer = LLTokenizer(text, n_vocab=model.vocab_size, eos_token=ends)
    matcher = LLMatcher(tokenizer, grammar_from("lark", sampling.grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


# --- what it must write ---------------------------------------------------------------------------


async def test_a_chat_has_no_grammar_of_its_own() -> None:
    assert (await sampling_of()).grammar is None


@pytest.mark.covers("G27")
@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"guided_choice": ["yes", "no"]},
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>no",
            "<|channel|>final<|message|>maybe",
        ),
        (
            {"tools": [NOW], "tool_choice": "required"},
            HARMONY.call_text("now", "{}").removesuffix("<|call|>"),
            "<|channel|>final<|message|>x",
        ),
        (
            {
                "tools": [NOW, WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "now"}},
            },
            HARMONY.call_text("now", "{}").removesuffix("<|call|>"),
            HARMONY.call_text("get_weather", '{"city": ""}').removesuffix("<|call|>"),
        ),
        (
            {"tools": [NOW], "response_format": {"type": "json_object"}},
            "<|channel|>final<|message|>{}",
            "<|channel|>final<|message|>x",
        ),
        ({"tools": [NOW]}, "<|channel|>final<|message|>x", "x"),
    ],
)
async def test_its_answers_follow_a_grammar(fields: dict[str, Any], right: str, wrong: str) -> None:
    model = harmony_model()
    sampling = await sampling_of(**fields)
    for said, is_right in ((right, True), (wrong, False)):
        matcher = matcher_of(sampling, model)
        token_ids = list(model.spelt(said))
        is_taken = matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert (is_taken and matcher.is_accepting()) is is_right, said


async def test_a_budget_ends_the_message_that_is_thought() -> None:
    model = harmony_model()
    [end] = model.spelt("<|end|>")
    sampling = await sampling_of(thinking_token_budget=20)
    begin = model.spelt("<|channel|>analysis<|message|>")
    wanted = ThinkingBudget(num_tokens=20, end_token_id=end, begin_token_ids=begin)
    assert sampling.rules.thinking == wanted
    assert sampling.grammar is not None
    assert "answer: thought? later" in sampling.grammar.text
    assert (await sampling_of(tools=[NOW], thinking_token_budget=20)).rules.thinking == wanted


async def test_no_other_tokens_spell_the_header_behind_which_a_budget_begins() -> None:
    """A model may spell a word with other tokens than its tokenizer: they would not be counted."""
    model = harmony_model()
    channel, *word, message = model.spelt("<|channel|>analysis<|message|>")
    letters = [one for letter in "analysis" for one in model.spelt(letter)]
    assert letters != word
    for fields in ({}, {"tools": [NOW]}):
        matcher = matcher_of(await sampling_of(thinking_token_budget=20, **fields), model)
        spelled = [channel, *letters, message]
        assert matcher.try_consume_tokens(spelled) < len(spelled)
        matcher = matcher_of(await sampling_of(thinking_token_budget=20, **fields), model)
        assert matcher.try_consume_tokens([channel, *word, message]) == len(word) + 2


async def test_an_answer_that_has_begun_does_not_think() -> None:
    begun = {"role": "assistant", "content": "Hel"}
    body = BODY | {
        "messages": [ASKED, begun],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 20,
    }
    prompt, sampling = await asked(body)
    assert prompt.endswith(f"{START}<|channel|>final<|message|>Hel")
    assert (sampling.rules.thinking, sampling.grammar) == (None, None)


# --- which models these are -----------------------------------------------------------------------


async def test_without_tokens_for_its_tags_an_answer_is_text() -> None:
    model = harmony_model(has_tokens=False)
    edge = make_edge(says("<|channel|>final<|message|>Hi"), model=model)
    async with edge.client() as client:
        response = await client.post(CHAT, json=BODY)
    message = response.json()["choices"][0]["message"]
    assert message["content"].startswith("<|channel|>final")
    error = await asked(BODY | {"tools": [NOW]}, status=400, of=model)
    assert error["param"] == "tools"


@pytest.mark.parametrize(
    "settings", [ChatSettings(tool_template="builtin"), ChatSettings(tool_format="hermes")]
)
async def test_its_calls_are_of_no_other_format(settings: ChatSettings) -> None:
    model = harmony_model(chat=settings)
    error = await asked(BODY | {"tools": [NOW]}, status=400, of=model)
    assert (error["param"], "harmony" in error["message"]) == ("tools", True)
    await asked(BODY, of=model)


async def test_what_is_thought_is_text_without_a_reasoning_format() -> None:
    model = harmony_model(chat=ChatSettings(reasoning_format="none"))
    _, sampling = await asked(BODY | {"thinking_token_budget": 9}, of=model)
    assert (sampling.rules.thinking, sampling.grammar) == (None, None)


async def test_a_template_that_takes_less_is_no_failure() -> None:
    model = harmony_model(
        HARMONY_TEMPLATE.replace("or tools", "").replace("in tools or []", "in []")
    )
    await asked(BODY, of=model)
    strict = function("f", a={"type": "string", "pattern": "(?=a)b"})
    strict["function"]["strict"] = True
    error = await asked(BODY | {"tools": [strict]}, status=400)
    assert "f" in error["message"]
