"""From a body to a plan: prompts as token ids, and how their choices draw.

Without `seed` each prompt draws one. Choice i of a prompt uses a seed made from (seed, i); choice 0
keeps the seed itself, so asking for more choices does not change the first.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import InvalidRequest
from common.grammar import Grammar
from grammars.gbnf import Gbnf, lark_of_gbnf
from router.api.bodies.asked import Asked, AskedTexts
from router.api.bodies.kinds import RequestKind, parse_request
from router.api.bodies.translations import asked_of
from router.api.planning.answer_syntax import AnswerRules, answer_rules
from router.api.planning.output import planned_output
from router.api.planning.prompts import Prompt, Prompts
from router.api.planning.request_plan import PlannedPrompt, RequestPlan
from router.api.planning.sampling import planned_sampling
from router.api.planning.token_dead_ends import check_drawable
from router.http.errors import ModelNotFound
from router.text.text_model import TextModel


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
        return self._plan(asked_of(parse_request(kind, raw)))

    def _plan(self, asked: Asked) -> RequestPlan:
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
                *(self._prompts.echo(prompt, has_offsets=has_offsets) if is_echo else ()),
            )
            for prompt, max_tokens in zip(prompts, output.max_tokens, strict=True)
        ]
        shape, ends = asked.shape, self._model.eos_token_ids
        sampling = planned_sampling(
            asked.sampling, output, answer.grammar, planned[0].seed, self._model
        )
        if not shape.stop:  # which could end an answer before
            # Shorter choices can have what begins the answer of the longest one.
            check_drawable(sampling, max(output.max_tokens), ends)
        stops = frozenset(sampling.stop_token_ids)
        has_tags = not answer.syntax.is_plain and self._model.has_special_tags
        return RequestPlan(
            prompts=tuple(planned),
            sampling=sampling,
            choices_per_prompt=output.num_run,
            returned_per_prompt=output.num_returned,
            scored_per_prompt=output.num_scored,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            session=asked.session,
            hidden_token_ids=frozenset() if shape.shows_stop else ends | stops,
            stop_token_ids=stops if sampling.ignore_eos else stops - ends,
            shows_special_tokens=shape.shows_special_tokens or has_tags,
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
        answer = answer_rules(self._model.chat, text, chat, grammar, name)
        return [self._prompts.of_chat(text, most)], answer


def check_model(asked: str | None, model: TextModel) -> None:
    """Raise `ModelNotFound` for a request that names another model; it may name none."""
    if asked is not None and not model.is_called(asked):
        raise ModelNotFound(asked, model.name)
