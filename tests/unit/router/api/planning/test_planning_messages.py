"""Plans and errors arrive from the planning process as they were sent."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError, InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.request import SamplingParams
from common.token_rules import NO_RULES, TokenRules
from grammars.parts import GrammarParts, SchemaPart
from router.api.bodies.asked import AnswerShape, RequestKind
from router.api.bodies.client_tools import ClientTool
from router.api.planning.messages import (
    LENGTHS,
    Message,
    pack_error,
    pack_message,
    pack_plan,
    pack_request,
    unpack_error,
    unpack_plan,
    unpack_prompt,
    unpack_request,
)
from router.api.planning.planner import PlannedPrompt, RequestPlan, seed_of_choice
from router.http.errors import MAX_MESSAGE_CHARS, ModelNotFound, api_error
from router.text.context_limits import ContextExceeded
from router.text.output.usage import UsageEvents
from router.tools.answer_parser import AnswerSyntax
from router.tools.harmony.message_cut import Place
from router.tools.tagged.kinds import ArgumentKinds
from router.tools.thinking import ThinkingFormat, ThinkingTags

SAMPLING = SamplingParams(
    max_tokens=9,
    temperature=0.1,
    top_k=3,
    top_p=0.3,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-0.7,
    frequency_penalty=1 / 3,
    seed=2**64 - 1,
    logprobs=0,
    prompt_logprobs=3,
    stop_token_ids=(5, 6),
    rules=TokenRules(biases=((3, 1.5),), bad_words=((7, 8), (9,)), allowed_token_ids=(3, 4)),
    ignore_eos=True,
    min_tokens=2,
)
PLAN = RequestPlan(
    prompts=(
        PlannedPrompt(
            token_ids=(0, 2**31, 2**32 - 1),
            seed=2**64 - 1,
            max_tokens=9,
            is_cut_to_fit=True,
            echo="a\x00漢",
            echo_offsets=(0, 0, 2),
        ),
        PlannedPrompt(token_ids=(7,), seed=0, max_tokens=11, is_cut_to_fit=False),
    ),
    sampling=SAMPLING,
    cache_salt="mine",
    session="my chat é",
    priority=-3,
    choices_per_prompt=2,
    returned_per_prompt=1,
    scored_per_prompt=1,
    echo_logprobs=0,
    has_output=False,
    stop_token_ids=frozenset({7}),
    hidden_token_ids=frozenset({1, 4}),
    shows_special_tokens=True,
    continues_prompt=True,
    syntax=AnswerSyntax(
        thinking=ThinkingFormat.BEGUN,
        tags=ThinkingTags("[THINK]", "[/THINK]"),
        call_format="hermes",
        call_names=("f", "g"),
        kinds={"f": ArgumentKinds({"a": frozenset({"null"})}, frozenset({"string"}))},
        is_named=True,
        calls_alone=True,
        place=Place.HEADER,
    ),
    grammar_parts=GrammarParts(
        Grammar(GrammarKind.REGEX, "a+", "guided_regex"),
        (
            SchemaPart(
                schema={"type": "object", "x": [None, 1.5]}, source="tools.0", is_lenient=True
            ),
            SchemaPart(
                schema={"pattern": "a"},
                source="tools.1",
                is_lenient=False,
                terminal="/a/",
                weaker="/b/",
            ),
        ),
    ),
    shape=AnswerShape(
        is_stream=True,
        usage_events=UsageEvents.EACH,
        has_logprobs=True,
        prompt_logprobs=2,
        returns_token_ids=True,
        stop=("\n", '"'),
        shows_stop=True,
        shows_special_tokens=True,
        hides_thinking=True,
        repeated={"tools": [{"name": "f"}], "top_p": 0.5, "user": None, "n": 10**400},
        client_tools={"a.b": ClientTool("b", "a"), "c": ClientTool("c", is_custom=True)},
        has_thought_codes=True,
        ignored_fields=("foo", "messages.id"),
        left_out=("tools of the type 'mcp'",),
    ),
)


def delivered(message: Message) -> Message:
    """The message behind a pipe."""
    head, rest = pack_message(message)
    head_bytes, rest_bytes = LENGTHS.unpack(head[: LENGTHS.size])
    assert (len(head) - LENGTHS.size, len(rest)) == (head_bytes, rest_bytes)
    return Message(json.loads(head[LENGTHS.size :]), bytes(rest))


def delivered_plan(plan: RequestPlan) -> RequestPlan:
    first, *prompts = [delivered(message) for message in pack_plan(plan)]
    assert first.head["num_prompts"] == len(prompts)
    return unpack_plan(first.head, [unpack_prompt(prompt) for prompt in prompts])


def test_a_plan_arrives_with_every_field() -> None:
    plan = delivered_plan(PLAN)
    assert plan == PLAN
    assert plan.prompt_lengths == (3, 1)
    assert plan.grammar_parts.asked is not None
    assert plan.grammar_parts.asked.source == "guided_regex"


def test_every_field_of_that_plan_is_told() -> None:
    """One that has its default, or says nothing, would arrive whatever becomes of it."""
    said_nothing: tuple[object, ...] = (None, (), {}, "", False, 0, NO_RULES)
    for group in (PLAN, PLAN.prompts[0], PLAN.shape, asdict(SAMPLING), asdict(PLAN.syntax)):
        fields = group if isinstance(group, dict) else group._asdict()
        silent = {name for name, value in fields.items() if value in said_nothing}
        assert silent <= {"has_output", "echo_logprobs", "logprobs", "grammar"}, type(group)


def test_a_grammar_arrives_once_for_all_choices() -> None:
    grammar = Grammar(GrammarKind.LARK, 'start: "é"' + " " * 1000, "guided_grammar")
    sampling = replace(SAMPLING, ignore_eos=False, grammar=grammar, rules=NO_RULES)
    plan = PLAN._replace(sampling=sampling)
    arrived = delivered_plan(plan)
    assert arrived == plan
    assert arrived.sampling.grammar is not None
    assert arrived.sampling.grammar.source == "guided_grammar"
    first = next(iter(pack_plan(plan)))
    assert len(json.dumps(first.head)) < 1000 + 2400


def test_each_choice_draws_with_its_own_seed_up_to_the_tokens_of_its_prompt() -> None:
    choices = list(delivered_plan(PLAN).choices())
    (one, first), (same, second), (_, third), (other, fourth) = choices
    assert one is same is not other
    assert first == SAMPLING
    assert second == replace(SAMPLING, seed=seed_of_choice(2**64 - 1, 1), prompt_logprobs=None)
    assert third == replace(SAMPLING, seed=0, max_tokens=11)
    seed = seed_of_choice(0, 1)
    assert fourth == replace(SAMPLING, seed=seed, max_tokens=11, prompt_logprobs=None)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.text())
def test_any_prompt_arrives(token_ids: list[int], echo: str) -> None:
    prompt = PlannedPrompt(tuple(token_ids), 2**64 - 1, 1, is_cut_to_fit=False, echo=echo)
    plan = PLAN._replace(prompts=(prompt,))
    assert delivered_plan(plan) == plan


@pytest.mark.parametrize("kind", RequestKind)
def test_a_body_arrives(kind: RequestKind) -> None:
    body = bytes(range(256)) * 2
    assert unpack_request(delivered(pack_request(kind, 1 << 40, body))) == (kind, 1 << 40, body)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no prompt", param="prompt"),
        InvalidRequest("the body is not valid JSON"),
        ContextExceeded("the prompt has 9 tokens", param="messages"),
        ModelNotFound("other", "tiny"),
        ModelNotFound("漢" * 1000, "tiny"),
        InvalidRequest("x" * 1_000_000, param="prompt"),
    ],
)
def test_an_error_of_the_body_keeps_its_type_and_words(error: Exception) -> None:
    packed = delivered(pack_error(error))
    assert len(json.dumps(packed.head)) < 2 * MAX_MESSAGE_CHARS
    arrived = unpack_error(packed.head["error"])
    assert type(arrived) is type(error)
    assert api_error(arrived).as_json() == api_error(error).as_json()
    assert api_error(arrived).status == api_error(error).status


def test_a_bug_arrives_without_its_words_and_with_its_trace_for_the_log() -> None:
    arrived = unpack_error(delivered(pack_error(KeyError("secret"), "at line 1")).head["error"])
    assert isinstance(arrived, InternalError)
    assert "secret" not in str(arrived)
    assert arrived.__notes__ == ["at line 1"]
