"""From a body to a plan: prompts as token ids, how their choices draw, how they are shown.

Without `seed` each prompt draws one. Choice i of a prompt uses a seed made from (seed, i); choice 0
keeps the seed itself, so asking for more choices does not change the first.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from common.errors import InvalidRequest
from common.grammar import Grammar
from common.request import SamplingParams
from grammars.gbnf import Gbnf, lark_of_gbnf
from grammars.parts import GrammarParts
from router.api.bodies.asked import AnswerShape, Asked, AskedTexts, RequestKind, asked_of
from router.api.planning.answer_syntax import AnswerRules, answer_rules
from router.api.planning.choices import MAX_CHOICES, planned_output, planned_sampling
from router.api.planning.token_dead_ends import check_drawable
from router.http.errors import ModelNotFound
from router.text.text_model import TextModel
from router.tools.answer_parser import AnswerSyntax


class PlannedPrompt(NamedTuple):
    """A prompt, the seed of its first choice, and the most tokens of each choice.

    With `is_cut_to_fit` the client set no limit, or one that is more than fits, and an answer may
    have as many tokens as a node holds.
    `echo`: the prompt as text, shown before the answer. `echo_offsets` is where the text of each
    token starts in it, if those have log probabilities.
    """

    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    is_cut_to_fit: bool
    echo: str = ""
    echo_offsets: tuple[int, ...] = ()


class RequestPlan(NamedTuple):
    """Everything one request asks for. Choice i answers prompt `i // choices_per_prompt`.

    `sampling` is that of all choices but for what a prompt or a choice has of its own.
    `returned_per_prompt`: the choices of a prompt that the client gets, the likeliest ones;
    `scored_per_prompt`: those for which log probabilities of the prompt are found. KV is shared
    with requests of the same `cache_salt` alone. `session` is what the body calls the request's
    session. An answer that stops at one of `stop_token_ids`
    names it; the model's own end is not among them. `continues_prompt`: the answer's text goes
    straight on from the prompt's. `syntax` is what an answer's text may hold. `echo_logprobs` is
    the number of alternatives shown per token of a prompt that is echoed. Without `has_output`
    nothing is generated: nodes draw one token, which is dropped. `grammar_parts`: what the grammar
    was written from.
    """

    prompts: tuple[PlannedPrompt, ...]
    sampling: SamplingParams
    choices_per_prompt: int
    returned_per_prompt: int
    scored_per_prompt: int
    priority: int
    cache_salt: str
    session: str
    hidden_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    shows_special_tokens: bool
    continues_prompt: bool
    syntax: AnswerSyntax
    echo_logprobs: int | None
    has_output: bool
    grammar_parts: GrammarParts
    shape: AnswerShape

    @property
    def num_choices(self) -> int:
        """How many choices run."""
        return len(self.prompts) * self.choices_per_prompt

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def prompts_of_returned(self) -> list[tuple[int, ...]]:
        """The prompt of each choice that the client gets."""
        return [one.token_ids for one in self.prompts for _ in range(self.returned_per_prompt)]

    def choices(self) -> Iterator[tuple[PlannedPrompt, SamplingParams]]:
        """Yield the prompt and the parameters of each choice."""
        for prompt in self.prompts:
            for index in range(self.choices_per_prompt):
                yield prompt, self._sampling(prompt, index)

    def _sampling(self, prompt: PlannedPrompt, index: int) -> SamplingParams:
        common = self.sampling
        seed = seed_of_choice(prompt.seed, index)
        scored = common.prompt_logprobs if index < self.scored_per_prompt else None
        own = (prompt.max_tokens, seed, scored)
        if own == (common.max_tokens, common.seed, common.prompt_logprobs):
            return common
        return replace(common, max_tokens=prompt.max_tokens, seed=seed, prompt_logprobs=scored)


def seed_of_choice(seed: int, index: int) -> int:
    """Return the unsigned 64-bit seed of choice `index`; choice 0 keeps `seed`."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


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
        self._draw_seed = draw_seed
        self._translate = translate
        self._prompts = Prompts(text_model, max_model_len)

    def plan(self, kind: RequestKind, raw: bytes) -> RequestPlan:
        """Plan a body of any API. Raises `InvalidRequest` and `ModelNotFound`."""
        asked = asked_of(kind, raw)
        try:
            return self._planned(asked)
        except InvalidRequest as error:
            if asked.places is None:
                raise
            raise asked.places.in_words_of_client(error) from None

    def _planned(self, asked: Asked) -> RequestPlan:
        prompts, answer = self._prompted(asked)
        output = planned_output(asked, [len(one.token_ids) for one in prompts], self._max_model_len)
        seed, is_echo = asked.sampling.seed, asked.output.is_echo
        has_offsets = output.echo_logprobs is not None
        planned = [
            PlannedPrompt(
                prompt.token_ids,
                self._draw_seed() if seed is None else seed,
                max_tokens,
                is_cut_to_fit,
                *(self._prompts.echo(prompt, has_offsets=has_offsets) if is_echo else ()),
            )
            for prompt, max_tokens, is_cut_to_fit in zip(
                prompts, output.max_tokens, output.is_cut_to_fit, strict=True
            )
        ]
        shape, ends = asked.shape, self._model.eos_token_ids
        sampling = planned_sampling(asked.sampling, output, answer, planned[0].seed, self._model)
        if not shape.stop:  # which could end an answer before
            # Shorter choices can have what begins the answer of the longest one.
            check_drawable(sampling, max(output.max_tokens), ends)
        stops = frozenset(sampling.stop_token_ids)
        return RequestPlan(
            prompts=tuple(planned),
            sampling=sampling,
            choices_per_prompt=output.choices_per_prompt,
            returned_per_prompt=output.returned_per_prompt,
            scored_per_prompt=output.scored_per_prompt,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            session=asked.session,
            hidden_token_ids=frozenset() if shape.shows_stop else ends | stops,
            stop_token_ids=stops if sampling.ignore_eos else stops - ends,
            shows_special_tokens=shape.shows_special_tokens,
            continues_prompt=asked.continues_prompt,
            syntax=answer.syntax,
            echo_logprobs=output.echo_logprobs,
            has_output=output.has_output,
            grammar_parts=answer.parts,
            shape=shape,
        )

    def _prompted(self, asked: Asked) -> tuple[list[Prompt], AnswerRules]:
        """Return the prompts, and what an answer to them may hold."""
        check_model(asked.model, self._model)
        most, grammar = asked.most_prompt_tokens, asked.sampling.grammar
        if isinstance(grammar, Gbnf):
            grammar = self._translate(grammar)
        chat = asked.prompt
        if isinstance(chat, AskedTexts):
            return self._prompts.of_texts(chat, most), AnswerRules(grammar=grammar)
        text = self._model.render_chat(chat.messages, chat.options)
        name = str if asked.places is None else asked.places.of
        has_budget = asked.sampling.thinking_budget is not None
        budget_in = self._model.spelt if has_budget else None
        answer = answer_rules(self._model.chat, text, chat, grammar, name, budget_in=budget_in)
        return [self._prompts.of_chat(text, most)], answer


def check_model(asked: str | None, model: TextModel) -> None:
    """Raise `ModelNotFound` for a request that names another model; it may name none."""
    if asked is not None and asked not in model.names:
        raise ModelNotFound(asked, model.name)


class Prompt(NamedTuple):
    """A prompt. `text` is None unless the client gave that text."""

    token_ids: tuple[int, ...]
    text: str | None = None


class Prompts:
    """Makes prompts for one model, of which a text has no more than `max_model_len` tokens."""

    def __init__(self, text_model: TextModel, max_model_len: int) -> None:
        self._model = text_model
        self._max_model_len = max_model_len

    def of_texts(self, texts: AskedTexts, most_tokens: int | None) -> list[Prompt]:
        """Return the prompts of text, several texts, token ids, or several lists of token ids.

        Of each the last `most_tokens` are kept; None: all. Raises `InvalidRequest` for what is none
        of these, and for a text without tokens, and `ContextExceeded`.
        """
        prompt = texts.prompt
        of_text = partial(
            self._of_text,
            most_tokens=most_tokens,
            add_special_tokens=texts.adds_special_tokens,
            is_plain=True,
            param="prompt",
        )
        if isinstance(prompt, str):
            return [of_text(prompt)]
        if not prompt:
            raise InvalidRequest("prompt is empty: wanted text or token ids", param="prompt")
        if len(prompt) > MAX_CHOICES and not _is_int(prompt[0]):
            raise InvalidRequest(
                f"prompt lists {len(prompt)} prompts: wanted at most {MAX_CHOICES}", param="prompt"
            )
        if all(isinstance(part, str) for part in prompt):
            return [of_text(text) for text in prompt]
        lists = prompt if all(isinstance(part, list) for part in prompt) else [prompt]
        return [self._of_ids(ids, most_tokens) for ids in lists]

    def of_chat(self, text: str, most_tokens: int | None) -> Prompt:
        """Return the prompt that a chat's template made, as `of_texts` does."""
        return self._of_text(
            text, most_tokens, add_special_tokens=False, is_plain=False, param="messages"
        )

    def _of_text(
        self,
        text: str,
        most_tokens: int | None,
        *,
        add_special_tokens: bool,
        is_plain: bool,
        param: str,
    ) -> Prompt:
        """Return one text; one that `is_plain` is as the client wrote it."""
        if not text:
            raise InvalidRequest(f"{param} is empty: wanted some text", param=param)
        token_ids = self._model.encode(
            text,
            add_special_tokens=add_special_tokens,
            is_plain=is_plain,
            param=param,
            max_model_len=self._max_model_len if most_tokens is None else sys.maxsize,
        )
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens: wanted some text", param=param)
        num_encoded = len(token_ids)
        if most_tokens is not None:
            token_ids = token_ids[-most_tokens:]
        return Prompt(token_ids=token_ids, text=text if len(token_ids) == num_encoded else None)

    def _of_ids(self, ids: list[Any], most_tokens: int | None) -> Prompt:
        if not ids:
            raise InvalidRequest("prompt is empty: wanted text or token ids", param="prompt")
        if most_tokens is not None:
            ids = ids[-most_tokens:]
        self._model.check_ids(ids, "prompt")
        return Prompt(token_ids=tuple(ids))

    def echo(self, prompt: Prompt, *, has_offsets: bool) -> tuple[str, tuple[int, ...]]:
        """Return a prompt as text, and where the text of each token starts in it, if asked for."""
        text = self._model.decode(prompt.token_ids) if prompt.text is None else prompt.text
        return text, self._text_offsets(prompt, text) if has_offsets else ()

    def _text_offsets(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """Return where the text of each token starts in `text`, which the prompt is shown as.

        A token without text of its own has the place of the next one. Special tokens have a text
        where the client wrote it.
        """
        decoder, end, offsets = self._model.new_detokenizer(), 0, []
        for token_id in prompt.token_ids:
            offsets.append(min(end, len(text)))
            shown = decoder.push(token_id)
            if not shown and prompt.text is not None and not decoder.has_pending:
                written = self._model.describe_token(token_id).text
                shown = written if text.startswith(written, end) else ""
            end += len(shown)
        return tuple(offsets)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
