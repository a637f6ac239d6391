"""Both generation endpoints, in one piece: what goes to the generator and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.request import FinishReason, RequestCounts, SamplingParams
from common.version import VERSION
from router.api.planning.planner import seed_of_choice
from router.text.text_model import TextModel
from tests.support.http.edge_model import CONTEXT, EOS, write_model_folder
from tests.support.http.http_edge import make_edge
from tests.support.http.posted import CHAT, CHAT_PATH, MODEL, TEXT, TEXT_PATH, encode, post
from tests.support.http.scripted_generator import Call, chunks, plays, says
from tests.support.http.tool_models import LLAMA_TEMPLATE, model_with

TRIMMING_TEMPLATE = (
    "{% for message in messages %}{{ '[' ~ message.role ~ '] ' ~ message.content.strip() ~ '\n' }}"
    "{% endfor %}"
)


async def call_of(path: str, body: dict[str, Any]) -> Call:
    edge = make_edge()
    await post(edge, path, body)
    return edge.generator.calls[0]


async def test_a_chat() -> None:
    edge = make_edge(says("Hello world", num_cached=7))
    answer = await post(edge, CHAT_PATH, CHAT)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["id"].startswith("chatcmpl-")
    (call,) = edge.generator.calls
    num_prompt = len(call.prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3,
        "total_tokens": num_prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
        },
    }
    assert call.closed.is_set()


@pytest.mark.covers("T31")
async def test_a_chat_prompt_is_the_template_and_no_more() -> None:
    call = await call_of(CHAT_PATH, CHAT)
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert call.prompt_token_ids == encode(rendered)
    assert call.prompt_token_ids.count(0) == 2


async def test_a_completion_prompt_gets_the_special_tokens() -> None:
    call = await call_of(TEXT_PATH, TEXT)
    assert call.prompt_token_ids == encode("Hi", special=True)
    assert call.prompt_token_ids[0] == 0


@pytest.mark.covers("T31")
@pytest.mark.parametrize("text", ["Hello", f"Hello{EOS}", "a\ue0000\ue001", "a\ue000999\ue001"])
async def test_a_completion_prompt_gets_no_special_tokens_where_none_are_asked_for(
    text: str,
) -> None:
    """The characters that mark special tokens in a chat are themselves."""
    with_bos, *ids = MODEL.encode(text, add_special_tokens=True, param="")
    assert with_bos == 0
    for prompt in (text, [text]):
        call = await call_of(TEXT_PATH, {"prompt": prompt, "add_special_tokens": False})
        assert call.prompt_token_ids == tuple(ids)
    for asked in (True, None):
        call = await call_of(TEXT_PATH, {"prompt": text, "add_special_tokens": asked})
        assert call.prompt_token_ids == (0, *ids)


@pytest.mark.covers("J10")
async def test_messages_of_every_shape() -> None:
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "user", "content": ["d", {"type": "text", "text": "e"}, "f"]},
    ]
    call = await call_of(CHAT_PATH, CHAT | {"messages": messages})
    text = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in (
            ("system", "Be brief"),
            ("user", "a\nb"),
            ("assistant", ""),
            ("assistant", "No."),
            ("user", "c"),
            ("user", "d\ne\nf"),
        )
    )
    assert call.prompt_token_ids == encode(text + "<|im_start|>assistant\n")


async def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": 42,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 4,
    }
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        call = await call_of(path, body | fields)
        wanted = SamplingParams(**fields | {"stop_token_ids": (5, 6)})  # type: ignore[arg-type]
        assert call.sampling == wanted


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_no_choice_stops_before_its_least_length(num_choices: int) -> None:
    least = len(encode("Hello world."))
    for min_tokens, text in ((0, "Hello wor"), (least, "Hello world. O")):
        edge = make_edge(says("Hello world. Old"))
        fields = {"n": num_choices, "min_tokens": min_tokens, "stop": ["ld"]}
        answer = await post(edge, TEXT_PATH, TEXT | fields)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [text] * num_choices
        assert [call.sampling.min_tokens for call in edge.generator.calls] == [
            min_tokens
        ] * num_choices


async def test_defaults() -> None:
    chat, text = await call_of(CHAT_PATH, CHAT), await call_of(TEXT_PATH, TEXT)
    assert chat.sampling.max_tokens == CONTEXT - len(chat.prompt_token_ids)
    assert text.sampling.max_tokens == 16
    assert chat.sampling.temperature == text.sampling.temperature == 1.0
    assert chat.sampling.seed != text.sampling.seed
    assert 500 < chat.deadline_s <= 600


async def test_the_default_of_a_completion_shrinks_to_the_room() -> None:
    call = await call_of(TEXT_PATH, TEXT | {"prompt": [5] * (CONTEXT - 3)})
    assert call.sampling.max_tokens == 3


async def test_the_newer_name_of_the_limit_wins() -> None:
    call = await call_of(CHAT_PATH, CHAT | {"max_tokens": 5, "max_completion_tokens": 6})
    assert call.sampling.max_tokens == 6


async def test_the_models_own_defaults_apply(tmp_path: Any) -> None:
    folder = write_model_folder(tmp_path, temperature=0.25, top_k=40, top_p=None)
    edge = make_edge(model=TextModel.load(folder, "tiny", 0))
    await post(edge, CHAT_PATH, CHAT)
    await post(edge, CHAT_PATH, CHAT | {"temperature": 1.5, "top_k": -1})
    first, second = (call.sampling for call in edge.generator.calls)
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 40, 1.0)
    assert (second.temperature, second.top_k) == (1.5, 0)


HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "logit_bias": {},
    "parallel_tool_calls": True,
    "stop": None,
}


@pytest.mark.covers("J15")
@pytest.mark.parametrize("field", [*HARMLESS, "all of them"])
async def test_a_harmless_field_changes_nothing(field: str) -> None:
    extra = {field: HARMLESS[field]} if field in HARMLESS else HARMLESS
    asked = CHAT | {"seed": 7}
    plain, call = await call_of(CHAT_PATH, asked), await call_of(CHAT_PATH, asked | extra)
    assert call.sampling == plain.sampling
    assert call.prompt_token_ids == plain.prompt_token_ids


async def test_choices_have_seeds_of_their_own() -> None:
    edge = make_edge()
    answer = await post(edge, TEXT_PATH, TEXT | {"n": 3, "seed": -2, "prompt": ["a", "b"]})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    seeds = [call.sampling.seed for call in edge.generator.calls]
    assert seeds[0] == 2**64 - 2
    assert seeds[:3] == seeds[3:] == [seed_of_choice(seeds[0], i) for i in range(3)]
    assert len(set(seeds)) == 3
    prompts = [call.prompt_token_ids for call in edge.generator.calls]
    assert prompts == [encode("a", special=True)] * 3 + [encode("b", special=True)] * 3


@pytest.mark.covers("T32")
async def test_prompts_without_a_seed_draw_one_each() -> None:
    edge = make_edge()
    await post(edge, TEXT_PATH, TEXT | {"prompt": ["a", "a"]})
    first, second = (call.sampling.seed for call in edge.generator.calls)
    assert first != second


@pytest.mark.covers("T32")
@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["a"], [encode("a", special=True)]),
    ],
)
async def test_prompts_of_every_shape(prompt: Any, prompts: list[tuple[int, ...]]) -> None:
    edge = make_edge()
    answer = await post(edge, TEXT_PATH, TEXT | {"prompt": prompt})
    assert [call.prompt_token_ids for call in edge.generator.calls] == prompts
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.covers("T01")
async def test_usage_counts_a_prompt_once_and_its_first_choices_cache() -> None:
    async def play(call: Call) -> Any:
        is_first = call.sampling.seed == 5
        for chunk in chunks(encode("Hello"), num_cached=10 if is_first else 99):
            yield chunk

    body = TEXT | {"n": 2, "prompt": [[5, 6], [7]], "seed": 5}
    usage = (await post(make_edge(play), TEXT_PATH, body))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 20


async def test_usage_sums_the_drafts_of_all_choices() -> None:
    async def play(call: Call) -> Any:
        first, last = chunks(encode("Hello world"), num_cached=0)
        yield first._replace(counts=RequestCounts(0, 3, 0))
        yield last._replace(counts=RequestCounts(0, 5, 1))

    edge = make_edge(play)
    usage = (await post(edge, CHAT_PATH, CHAT | {"n": 2}))["usage"]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 8,
        "reasoning_tokens": 0,
    }
    assert edge.metric("pdserve_accepted_prediction_tokens_total") == 2
    assert edge.metric("pdserve_rejected_prediction_tokens_total") == 8


@pytest.mark.parametrize(("asked", "priority"), [({}, 0), ({"priority": -1000}, -1000)])
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
async def test_the_priority_reaches_the_cluster(
    path: str, body: dict[str, Any], asked: dict[str, int], priority: int
) -> None:
    edge = make_edge()
    await post(edge, path, body | asked)
    assert [call.priority for call in edge.generator.calls] == [priority]


async def test_echo() -> None:
    edge = make_edge(says("lazy"))
    answer = await post(edge, TEXT_PATH, TEXT | {"echo": True, "prompt": "Hi"})
    assert answer["choices"][0]["text"] == "Hilazy"
    ids = list(encode("dog"))
    answer = await post(edge, TEXT_PATH, TEXT | {"echo": True, "prompt": ids})
    assert answer["choices"][0]["text"] == "doglazy"


@pytest.mark.covers("T03")
@pytest.mark.parametrize("size", [1, 4])
async def test_a_stop_string_cuts_and_closes(size: int) -> None:
    edge = make_edge(says("Hello world over the lazy dog", FinishReason.LENGTH, size=size))
    answer = await post(edge, CHAT_PATH, CHAT | {"stop": ["zzz", "rld o"]})
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello wo", "stop")
    (call,) = edge.generator.calls
    assert call.closed.is_set()
    assert answer["usage"]["completion_tokens"] == len(encode("Hello world over"))
    assert call.num_pushed == (3 if size == 1 else 1)


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
@pytest.mark.parametrize("size", [1, 20])
async def test_a_stop_string_is_shown_where_asked_for(size: int, field: str) -> None:
    body = TEXT | {"stop": "lo", "max_tokens": 20, field: True}
    answer = await post(make_edge(says("Hello world", size=size)), TEXT_PATH, body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Hello"),
        ({"skip_special_tokens": False}, "Hello<|im_start|>"),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "Hello<|im_start|><|im_end|>",
        ),
    ],
)
async def test_special_tokens_are_shown_where_asked_for(fields: dict[str, Any], text: str) -> None:
    ids = [*encode("Hello"), 0, 1]
    edge = make_edge(plays(chunks(ids, FinishReason.STOP)))
    answer = await post(edge, TEXT_PATH, TEXT | fields)
    assert answer["choices"][0]["text"] == text


@pytest.mark.parametrize("prompt", ["Hello world, Hello", [5, 6, 7, 8, 9]])
async def test_a_prompt_is_cut_to_its_last_tokens(prompt: Any) -> None:
    ids = tuple(prompt) if isinstance(prompt, list) else encode(prompt, special=True)
    call = await call_of(TEXT_PATH, TEXT | {"prompt": prompt, "truncate_prompt_tokens": 3})
    assert call.prompt_token_ids == ids[-3:]
    call = await call_of(TEXT_PATH, TEXT | {"prompt": prompt, "truncate_prompt_tokens": 200})
    assert call.prompt_token_ids == ids


async def test_a_prompt_that_is_too_long_is_served_when_it_may_be_cut() -> None:
    for prompt in ("qz " * 10_000, [5] * 1000):
        body = TEXT | {"prompt": prompt, "truncate_prompt_tokens": 100, "echo": True}
        edge = make_edge()
        answer = await post(edge, TEXT_PATH, body)
        (call,) = edge.generator.calls
        assert len(call.prompt_token_ids) == 100
        assert answer["choices"][0]["text"].startswith(MODEL.decode(call.prompt_token_ids))


async def test_a_chat_without_the_prompt_of_an_answer() -> None:
    call = await call_of(CHAT_PATH, CHAT | {"add_generation_prompt": False})
    assert call.prompt_token_ids == encode("<|im_start|>user\nHi<|im_end|>\n")


async def test_the_final_message_is_continued() -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Hello wor"}]
    body = CHAT | {"messages": messages, "continue_final_message": True}
    edge = make_edge(says("ld"))
    answer = await post(edge, CHAT_PATH, body)
    assert answer["choices"][0]["message"]["content"] == "ld"
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello wor"
    assert edge.generator.calls[0].prompt_token_ids == encode(rendered)


@pytest.mark.covers("J11")
@pytest.mark.parametrize("template", [LLAMA_TEMPLATE, TRIMMING_TEMPLATE])
@pytest.mark.parametrize("begun", ["It is ", "a: |\n  ", " \n", "\n", ""])
async def test_a_template_that_trims_leaves_the_end_of_a_continued_message(
    template: str, begun: str
) -> None:
    """Its white space at the end; that at the beginning is the template's to trim."""
    model = model_with(template)
    messages = [*CHAT["messages"], {"role": "assistant", "content": f"Yes.{begun}"}]
    edge = make_edge(says("on"), model=model)
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await post(edge, CHAT_PATH, CHAT | {"messages": messages, **more})
    assert answer["choices"][0]["message"]["content"] == "on"
    prompt = model.decode(edge.generator.calls[0].prompt_token_ids, with_special_tokens=True)
    assert prompt.endswith(f"Yes.{begun}")


DROPPING = """\
{% for message in messages %}{% set said = message.content %}
{%- if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}
{{- message.role + ':' + said + '\n' }}{% endfor %}"""
"""As DeepSeek-R1's."""
KEEPING = """\
{% for message in messages %}{% set said = message.content %}{% set thought = '' %}
{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- message.role + ':<think>\n' + thought + '\n</think>\n\n' + said + '\n' }}{% endfor %}"""
"""As Qwen3's."""


@pytest.mark.covers("T43")
@pytest.mark.parametrize("template", [DROPPING, KEEPING])
@pytest.mark.parametrize(
    ("begun", "by_qwen"),
    [
        ("<think>\nhm\n</think>\n\nSo", "<think>\nhm\n</think>\n\nSo"),
        ("<think>\nhm\n</think>\n\n", "<think>\nhm\n</think>\n\n"),
        ("<think>\nhm\n\n</think>", "<think>\nhm\n</think>\n\n"),
        ("So", "<think>\n\n</think>\n\nSo"),
    ],
)
async def test_thinking_in_a_message_that_is_continued_is_in_the_prompt(
    template: str, begun: str, by_qwen: str
) -> None:
    model = model_with(template)
    earlier = {"role": "assistant", "content": "<think>no</think>Yes"}
    messages = [earlier, *CHAT["messages"], {"role": "assistant", "content": begun}]
    edge = make_edge(says("on"), model=model)
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await post(edge, CHAT_PATH, CHAT | {"messages": messages, **more})
    assert answer["choices"][0]["message"]["content"] == "on"
    prompt = model.decode(edge.generator.calls[0].prompt_token_ids, with_special_tokens=True)
    assert ("no" in prompt) is (template is KEEPING)
    assert prompt.endswith("assistant:" + (begun if template is DROPPING else by_qwen))


async def test_a_template_is_told_what_the_request_says(tmp_path: Any) -> None:
    folder = write_model_folder(tmp_path)
    source = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].reasoning_content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    edge = make_edge(model=TextModel.load(folder, "tiny", 0))
    message = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    body = {
        "messages": [message],
        "chat_template_kwargs": {"enable_thinking": False, "messages": "mine"},
        "reasoning_effort": "low",
    }
    await post(edge, CHAT_PATH, body)
    assert edge.generator.calls[0].prompt_token_ids == encode("False low hm")


@pytest.mark.covers("T42")
@pytest.mark.parametrize(
    ("path", "more", "wanted"),
    [
        (CHAT_PATH, {}, "- - -"),
        (CHAT_PATH, {"reasoning_effort": "low"}, "- - -"),
        (CHAT_PATH, {"reasoning_effort": "none"}, "False False 0"),
        (
            CHAT_PATH,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "True - -",
        ),
        (CHAT_PATH, {"enable_thinking": False, "reasoning_effort": "high"}, "False False 0"),
        (CHAT_PATH, {"enable_thinking": True, "thinking": {"type": "disabled"}}, "True True -"),
        (CHAT_PATH, {"thinking": {"type": "disabled"}}, "False False 0"),
        (CHAT_PATH, {"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "True True -"),
        (CHAT_PATH, {"thinking": False}, "False False 0"),
        (CHAT_PATH, {"thinking": None, "enable_thinking": None}, "- - -"),
        (CHAT_PATH, {"thinking": []}, "- - -"),
        (CHAT_PATH, {"reasoning": {"effort": "none"}}, "False False 0"),
        (CHAT_PATH, {"reasoning": {"enabled": False}}, "False False 0"),
        (CHAT_PATH, {"reasoning": False}, "False False 0"),
        (CHAT_PATH, {"reasoning": {"enabled": True, "exclude": False}}, "True True -"),
        (CHAT_PATH, {"reasoning": {"effort": "high", "summary": "auto"}}, "- - -"),
        (CHAT_PATH, {"reasoning": {"effort": "none"}, "reasoning_effort": "high"}, "- - -"),
        (
            CHAT_PATH,
            {"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}},
            "True True -",
        ),
        (CHAT_PATH, {"reasoning": {}}, "- - -"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, "False False 0"),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "- - -"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "False False 0"),
        ("/v1/messages", {"output_config": {"effort": "none"}}, "False False 0"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, "True True -"),
    ],
)
async def test_a_model_that_is_not_to_think_is_told_so(
    path: str, more: dict[str, Any], wanted: str, tmp_path: Any
) -> None:
    """In the words of Qwen3's template, of DeepSeek's and Hermes 4's, and of Seed-OSS's."""
    names = ("enable_thinking", "thinking", "thinking_budget")
    source = " ".join(f"{{{{ {name} | default('-') }}}}" for name in names)
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    edge = make_edge(model=TextModel.load(folder, "tiny", 0))
    asked = {"input": "Hi"} if path == "/v1/responses" else CHAT | {"max_tokens": 9}
    await post(edge, path, asked | more)
    assert edge.generator.calls[0].prompt_token_ids == encode(wanted)


@pytest.mark.covers("J30")
@pytest.mark.parametrize(
    ("path", "more", "wanted"),
    [
        (CHAT_PATH, {"reasoning_effort": "high"}, "xhigh -"),
        (CHAT_PATH, {"reasoning_effort": "low"}, "low -"),
        (CHAT_PATH, {"reasoning": {"effort": "high"}}, "xhigh -"),
        (CHAT_PATH, {"reasoning_effort": "none"}, "- False"),
        ("/v1/responses", {"reasoning": {"effort": "minimal"}}, "low -"),
        ("/v1/messages", {"output_config": {"effort": "high"}}, "xhigh -"),
        (
            "/v1/messages",
            {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}},
            "xhigh True",
        ),
    ],
)
async def test_an_effort_that_agents_always_ask_for_is_no_error(
    path: str, more: dict[str, Any], wanted: str, tmp_path: Any
) -> None:
    """By a template that knows other ones, as that of Qwen3.8."""
    source = (
        "{%- if enable_thinking is not defined or enable_thinking %}"
        "{%- if reasoning_effort | default('low') not in ('xhigh', 'medium', 'low') %}"
        "{{- raise_exception('Unexpected reasoning effort') }}{%- endif %}{%- endif %}"
        "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }}"
    )
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    edge = make_edge(model=TextModel.load(folder, "tiny", 0))
    asked = {"input": "Hi"} if path == "/v1/responses" else CHAT | {"max_tokens": 9}
    await post(edge, path, asked | more)
    assert edge.generator.calls[0].prompt_token_ids == encode(wanted)


async def test_the_version_is_the_system_fingerprint() -> None:
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        answer = await post(make_edge(), path, body)
        assert answer["system_fingerprint"] == f"pdserve-{VERSION}"


async def test_chat_logprobs() -> None:
    ids = encode("é!")
    edge = make_edge(says("é!", FinishReason.LENGTH))
    answer = await post(edge, CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert [entry["logprob"] for entry in content] == [-0.5] * 3
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 3
    other = content[2]["top_logprobs"][1]
    assert (other["token"], other["logprob"]) == (MODEL.describe_token(ids[2] + 1).text, -1.5)
    assert edge.generator.calls[0].sampling.logprobs == 2
    plain = await call_of(CHAT_PATH, CHAT)
    assert plain.sampling.logprobs is None


async def test_completion_logprobs() -> None:
    edge = make_edge(says("Hello world", FinishReason.LENGTH))
    answer = await post(edge, TEXT_PATH, TEXT | {"logprobs": 0})
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["Hello", " world"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hello": -0.5}, {" world": -0.5}],
        "text_offset": [0, 5],
    }


async def test_metrics() -> None:
    edge = make_edge(says("Hello world", num_cached=2))
    await post(edge, CHAT_PATH, CHAT)
    outcome = {"endpoint": "chat.completions", "outcome": "ok"}
    assert edge.metric("pdserve_requests_total", **outcome) == 1
    assert edge.metric("pdserve_requests_in_progress") == 0
    num_prompt = len(edge.generator.calls[0].prompt_token_ids)
    assert edge.metric("pdserve_prompt_tokens_total") == num_prompt
    assert edge.metric("pdserve_cached_prompt_tokens_total") == 2
    assert edge.metric("pdserve_output_tokens_total") == 3
    for name, count in (
        ("time_to_first_token", 1),
        ("inter_token_latency", 2),
        ("time_per_output_token", 1),
        ("request_latency", 1),
    ):
        assert edge.metric(f"pdserve_{name}_seconds_count") == count
