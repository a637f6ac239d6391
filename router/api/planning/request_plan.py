"""What one request asks a cluster for: its prompts, how their choices draw, how they are shown."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from common.request import SamplingParams
from grammars.parts import GrammarParts
from router.api.bodies.asked import AnswerShape
from router.tools.answer_parser import AnswerSyntax


class PlannedPrompt(NamedTuple):
    """A prompt, the seed of its first choice, and the most tokens of each choice.

    `echo`: the prompt as text, shown before the answer. `echo_offsets` is where the text of each
    token starts in it, if those have log probabilities.
    """

    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
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
