"""From a body to a plan: prompts as token ids, and the sampling parameters of each choice.

Defaults: a sampling field that the request leaves out takes the model's own value from
generation_config.json, else OpenAI's (temperature 1, top_p 1). Without `max_tokens` a chat may use
the rest of the context and a completion gets 16 tokens. Without `seed` each prompt draws one. With
`best_of` more choices run than are returned. Choice i of a prompt uses a seed made from (seed, i);
choice 0 keeps the seed itself, so asking for more choices does not change the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from common.errors import InvalidRequest
from common.grammar import Grammar
from common.request import SamplingParams, check_cache_salt, check_priority
from common.token_rules import TokenRules
from grammars.gbnf import Gbnf, lark_of_gbnf
from grammars.parts import NO_PARTS, GrammarParts
from router.api.bodies.chat_messages import template_messages, template_options
from router.api.bodies.checked_fields import (
    MaxTokens,
    bad_words,
    cause_of_logprobs,
    check_model,
    check_repeated,
    checked_logprobs,
    has_output,
    logit_biases,
    most_prompt_tokens,
    num_choices,
    scored_prompts,
    stop_strings,
    usage_events,
    within_logprobs,
)
from router.api.bodies.client_tools import ClientTool
from router.api.bodies.messages.request import CountedBody
from router.api.bodies.response_format import grammar_of
from router.api.bodies.schemas import (
    AnyBody,
    ChatBody,
    CompletionBody,
    SamplingFields,
    parse_body,
)
from router.api.bodies.tool_fields import tool_use
from router.api.bodies.unknown_fields import named_fields
from router.api.planning.answer_syntax import AnswerRules, answer_rules
from router.api.planning.prompts import Prompt, Prompts, check_token_ids
from router.api.planning.seeds import choices_like, first_seed
from router.api.planning.token_dead_ends import check_drawable
from router.api.planning.translations import (
    Translation,
    translated_message,
    translated_response,
)
from router.text.context_limits import output_limit
from router.text.text_model import TextModel, filters_of_nodes
from router.text.usage import UsageEvents
from router.tools.answer_parser import PLAIN, AnswerSyntax

COMPLETION_MAX_TOKENS = 16
_SCORED = ("prompt_logprobs",)


class RequestKind(Enum):
    """Which of the APIs a body is for; either of the first two: a chat if it has messages."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    MESSAGE = "message"
    COUNTED_MESSAGE = "counted message"
    EITHER = "either"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePlan:
    """One choice: what to run, and `echo`: the prompt as text, shown before the answer.

    `echo_offsets` is where the text of each token starts in it, if those have log probabilities.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    echo: str = ""
    echo_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """Everything one request asks for. Choice i answers prompt `i // choices_per_prompt`.

    `continues_prompt`: the answer's text goes straight on from the prompt's. `shows_stop`: stop
    strings and stop tokens are a part of the text. An answer that stops at one of `stop_token_ids`
    names it; the model's own end is not among them. `returned_per_prompt`: the choices of a prompt
    that the client gets, the likeliest ones. `syntax` is what an answer's text may hold,
    `repeated` the fields of the request that the answer has too. KV is shared with requests of the
    same `cache_salt` alone. `ignored_fields` are some of those that the server does not know,
    `left_out` kinds of parts that it does not have. `client_tools`: what the client calls
    functions that it knows as other tools.
    `prompt_logprobs` is the number of alternatives shown per token of a prompt, beside its own
    (None: nothing is), and `echo_logprobs` that of a prompt that is echoed. Without `has_output`
    nothing is generated: nodes draw one token, which is dropped. `grammar_parts`: what the
    grammar was written from.
    """

    choices: tuple[ChoicePlan, ...]
    choices_per_prompt: int
    returned_per_prompt: int
    stop: tuple[str, ...]
    hidden_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    shows_stop: bool
    shows_special_tokens: bool
    has_logprobs: bool
    returns_token_ids: bool
    is_stream: bool
    usage_events: UsageEvents
    continues_prompt: bool
    syntax: AnswerSyntax = PLAIN
    repeated: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    ignored_fields: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    echo_logprobs: int | None = None
    has_output: bool = True
    grammar_parts: GrammarParts = NO_PARTS

    @property
    def rules(self) -> TokenRules:
        """The rules about single tokens of all choices."""
        return self.choices[0].sampling.rules

    @property
    def returned_choices(self) -> tuple[ChoicePlan, ...]:
        """One plan for each choice that the client gets."""
        num_run, num_returned = self.choices_per_prompt, self.returned_per_prompt
        return tuple(c for i, c in enumerate(self.choices) if i % num_run < num_returned)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of all choices."""
        return self.choices[0].sampling.grammar

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(
            len(choice.prompt_token_ids) for choice in self.choices[:: self.choices_per_prompt]
        )


class Planner:
    """Plans requests for one model. Raises `InvalidRequest` and `ModelNotFound`, nothing else."""

    def __init__(
        self,
        text_model: TextModel,
        max_model_len: int,
        draw_seed: Callable[[], int],
        translate: Callable[[Gbnf], Grammar] = lark_of_gbnf,
    ) -> None:
        """Allow `max_model_len` tokens in all; `draw_seed` returns a random 64-bit number.

        `translate` makes Lark of GBNF; the planner raises what it raises.
        """
        self._model = text_model
        self._max_model_len = max_model_len
        self._seed = partial(first_seed, draw_seed)
        self._translate = translate
        self._prompts = Prompts(text_model, max_model_len)

    def plan(self, kind: RequestKind, raw: bytes) -> RequestPlan:
        """Plan a body of any API. Raises `InvalidRequest` and `ModelNotFound`."""
        if kind is RequestKind.EITHER:
            has_messages = parse_body(AnyBody, raw).messages is not None
            kind = RequestKind.CHAT if has_messages else RequestKind.COMPLETION
        match kind:
            case RequestKind.COMPLETION:
                return self.plan_completion(raw)
            case RequestKind.RESPONSE:
                return self._plan_translated(translated_response(raw))
            case RequestKind.MESSAGE:
                return self._plan_translated(translated_message(raw))
            case RequestKind.COUNTED_MESSAGE:
                return self._plan_translated(translated_message(raw, CountedBody))
            case _:
                return self._plan_chat(parse_body(ChatBody, raw))

    def _plan_translated(self, translation: Translation) -> RequestPlan:
        try:
            plan = self._plan_chat(
                translation.chat,
                scored_by=(),
                name=translation.places.of,
                keeps_system=translation.keeps_system,
            )
        except InvalidRequest as error:
            raise translation.places.in_words_of_client(error) from None
        ignored = named_fields(translation.unknown_fields())
        return replace(
            plan,
            repeated=translation.repeated,
            client_tools=translation.client_tools,
            ignored_fields=ignored,
            left_out=translation.left_out,
        )

    def _plan_chat(
        self,
        body: ChatBody,
        scored_by: Sequence[str] = _SCORED,
        name: Callable[[str], str] = str,
        *,
        keeps_system: bool = False,
    ) -> RequestPlan:
        """Plan a chat; `scored_by`: the API's fields that score a prompt; `name` names a field."""
        check_model(body.model, self._model)
        use = tool_use(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls)
        tools = tuple(tool.as_json() for tool in use.tools) if use else ()
        messages, options = template_messages(body.messages), template_options(body, tools)
        options = replace(options, keeps_system=keeps_system)
        text = self._model.render_chat(messages, options)
        answer = answer_rules(self._model.chat, text, options, use, self._grammar(body))
        most_tokens = most_prompt_tokens(body)
        prompt = self._prompts.of_text(
            text, most_tokens, add_special_tokens=False, is_plain=False, param="messages"
        )
        has_logprobs = bool(body.logprobs)
        if body.top_logprobs and not has_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        num_logprobs = checked_logprobs(body.top_logprobs or 0, "top_logprobs")
        newer = body.max_completion_tokens
        return self._plan(
            body,
            [prompt],
            max_tokens=MaxTokens(body.max_tokens, "max_tokens")
            if newer is None
            else MaxTokens(newer, "max_completion_tokens"),
            num_logprobs=num_logprobs if has_logprobs else None,
            continues_prompt=options.continues_final_message,
            answer=answer.named(name),
            scored_by=scored_by,
        )

    def plan_completion(self, raw: bytes) -> RequestPlan:
        """Plan a `/v1/completions` body. Raises `InvalidRequest` and `ModelNotFound`."""
        body = parse_body(CompletionBody, raw)
        check_model(body.model, self._model)
        num_logprobs, adds = body.logprobs, body.add_special_tokens is not False
        if num_logprobs is not None:
            checked_logprobs(num_logprobs, "logprobs")
        return self._plan(
            body,
            self._prompts.of_body(body.prompt, most_prompt_tokens(body), add_special_tokens=adds),
            max_tokens=MaxTokens(body.max_tokens, "max_tokens", default=COMPLETION_MAX_TOKENS),
            num_logprobs=num_logprobs,
            best_of=body.best_of,
            is_echo=bool(body.echo),
            continues_prompt=True,
            answer=AnswerRules(grammar=self._grammar(body)),
            scored_by=("echo", "prompt_logprobs"),
        )

    def _grammar(self, body: SamplingFields) -> Grammar | None:
        asked = grammar_of(body)
        return self._translate(asked) if isinstance(asked, Gbnf) else asked

    def _plan(
        self,
        body: SamplingFields,
        prompts: Sequence[Prompt],
        *,
        max_tokens: MaxTokens,
        num_logprobs: int | None,
        best_of: int | None = None,
        is_echo: bool = False,
        continues_prompt: bool = False,
        answer: AnswerRules,
        scored_by: Sequence[str],
    ) -> RequestPlan:
        n, num_run = num_choices(body, best_of, len(prompts))
        priority, cache_salt = body.priority or 0, body.cache_salt or ""
        check_priority(priority)
        check_cache_salt(cache_salt)
        # Which choices are the best is found from the probabilities of their tokens.
        run_logprobs = 0 if num_logprobs is None and num_run > n else num_logprobs
        common = self._sampling_fields(body)
        common |= {"logprobs": run_logprobs, "grammar": answer.grammar, "rules": self._rules(body)}
        num_echoed, is_chat = num_logprobs if is_echo else None, isinstance(body, ChatBody)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        scored = scored_prompts(body, num_echoed, lengths, 1 if is_chat else num_run)
        check_repeated(body, 1 if is_chat else n, lengths, is_echo=is_echo)
        can_be_0 = is_echo or scored is not None
        outputs = has_output(max_tokens, body, can_be_0=can_be_0, with_fields=scored_by)
        cause = cause_of_logprobs(num_logprobs, num_run, is_chat=is_chat)
        limit = within_logprobs(max_tokens, num_run * len(prompts), run_logprobs, cause)
        choices: list[ChoicePlan] = []
        for prompt in prompts:
            ids = prompt.token_ids
            common["max_tokens"] = output_limit(
                len(ids),
                limit.asked if outputs else 1,
                max_model_len=self._max_model_len,
                default=limit.default,
                max_tokens_param=limit.param,
            )
            sampling = SamplingParams(**common, seed=self._seed(body.seed), prompt_logprobs=scored)
            first = ChoicePlan(prompt_token_ids=ids, sampling=sampling, priority=priority)
            if is_echo:
                first = self._echoing(first, prompt, has_offsets=num_echoed is not None)
            choices += choices_like(first, num_run, is_chat=is_chat)
        self._check(body, choices)
        shows_stop = bool(body.include_stop_str_in_output or body.no_stop_trim)
        eos_ids, stop_ids = self._model.eos_token_ids, frozenset(common["stop_token_ids"])
        return RequestPlan(
            choices=tuple(choices),
            choices_per_prompt=num_run,
            returned_per_prompt=n,
            stop=stop_strings(body.stop),
            hidden_token_ids=frozenset() if shows_stop else eos_ids | stop_ids,
            stop_token_ids=stop_ids if body.ignore_eos else stop_ids - eos_ids,
            shows_stop=shows_stop,
            shows_special_tokens=self._shows_special_tokens(body, answer),
            has_logprobs=num_logprobs is not None,
            returns_token_ids=bool(body.return_token_ids),
            is_stream=bool(body.stream),
            usage_events=usage_events(body),
            continues_prompt=continues_prompt,
            syntax=answer.syntax,
            cache_salt=cache_salt,
            ignored_fields=named_fields(body.unknown_fields()),
            prompt_logprobs=body.prompt_logprobs,
            echo_logprobs=num_echoed,
            has_output=outputs,
            grammar_parts=answer.parts,
        )

    def _shows_special_tokens(self, body: SamplingFields, answer: AnswerRules) -> bool:
        has_tags = not answer.syntax.is_plain and self._model.has_special_tags
        return body.skip_special_tokens is False or has_tags

    def _check(self, body: SamplingFields, choices: Sequence[ChoicePlan]) -> None:
        if not body.stop:  # which could end an answer before
            # Shorter choices can have what begins the answer of the longest one.
            longest = max((one.sampling for one in choices), key=lambda one: one.max_tokens)
            check_drawable(longest, self._model.eos_token_ids)

    def _echoing(self, choice: ChoicePlan, prompt: Prompt, *, has_offsets: bool) -> ChoicePlan:
        echo = self._prompts.shown(prompt)
        offsets = self._prompts.text_offsets(prompt, echo) if has_offsets else ()
        return replace(choice, echo=echo, echo_offsets=offsets)

    def _sampling_fields(self, body: SamplingFields) -> dict[str, Any]:
        fields: dict[str, Any] = dict(self._model.default_sampling)
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "min_tokens"),
        ):
            value = getattr(body, name)
            if value is not None:
                fields[name] = value
        fields = filters_of_nodes(fields)
        if "top_k" in fields:
            fields["top_k"] = min(fields["top_k"], self._vocab)
        stop_token_ids = body.stop_token_ids or []
        check_token_ids(stop_token_ids, "stop_token_ids", self._vocab)
        fields["stop_token_ids"] = tuple(stop_token_ids)
        fields["ignore_eos"] = bool(body.ignore_eos)
        return fields

    def _rules(self, body: SamplingFields) -> TokenRules:
        allowed = body.allowed_token_ids or []
        check_token_ids(allowed, "allowed_token_ids", self._vocab)
        return TokenRules(
            biases=logit_biases(body, self._vocab),
            bad_words=bad_words(body, self._model),
            allowed_token_ids=tuple(allowed),
        )

    @property
    def _vocab(self) -> int:
        return self._model.vocab_size
