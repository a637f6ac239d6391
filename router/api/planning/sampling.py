"""The sampling parameters of a request, for one model.

A field that the request leaves out takes the model's own value from generation_config.json, else
OpenAI's (temperature 1, top_p 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.errors import InvalidRequest
from common.grammar import Grammar
from common.request import SamplingParams
from common.token_rules import MAX_BAD_WORDS, TokenRules
from router.api.bodies.asked import AskedSampling
from router.api.planning.output import PlannedOutput
from router.text.text_model import TextModel, filters_of_nodes

MAX_WORDS = MAX_BAD_WORDS // 2
MAX_WORD_CHARS = 128
_MAX_ID_DIGITS = 10


def planned_sampling(
    asked: AskedSampling,
    output: PlannedOutput,
    grammar: Grammar | None,
    seed: int,
    model: TextModel,
) -> SamplingParams:
    """Return how the choices of the first prompt draw, up to the fewest tokens that any choice may
    have.

    Raises `InvalidRequest` for a value out of range.
    """
    rules = TokenRules(
        biases=_biases(asked.logit_bias, model.vocab_size),
        bad_words=_bad_words(asked.bad_words, model),
        allowed_token_ids=tuple(asked.allowed_token_ids),
    )
    model.check_ids(asked.stop_token_ids, "stop_token_ids")
    model.check_ids(asked.allowed_token_ids, "allowed_token_ids")
    fields = filters_of_nodes({**model.default_sampling, **asked.drawn})
    if "top_k" in fields:
        fields["top_k"] = min(fields["top_k"], model.vocab_size)
    return SamplingParams(
        **fields,
        max_tokens=min(output.max_tokens),
        seed=seed,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        grammar=grammar,
        rules=rules,
    )


def _biases(by_name: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return what is added to the logits of single tokens, in order of their ids."""
    biases = {}
    for name, bias in by_name.items():
        is_number = len(name) <= _MAX_ID_DIGITS and name.isascii() and name.isdecimal()
        if not is_number or int(name) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {name[:20]!r}: wanted a token id, 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        biases[int(name)] = bias
    return tuple(sorted(biases.items()))


def _bad_words(words: Sequence[str], model: TextModel) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens that spell words which must not be written.

    A word is spelt in two ways, as in vLLM: as it is, and as its tokens behind a space are.
    """
    if len(words) > MAX_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} words: wanted at most {MAX_WORDS}", param="bad_words"
        )
    spelt: dict[tuple[int, ...], None] = {}
    for word in words:
        text = word.lstrip()
        if not 1 <= len(text) <= MAX_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words has an empty or too long word: wanted 1 to {MAX_WORD_CHARS} characters",
                param="bad_words",
            )
        alone, behind_space = model.spelt(text), model.spelt(f" {text}")
        spelt[alone] = None
        if len(behind_space) == len(alone) and behind_space[0] != alone[0]:
            spelt[behind_space] = None
    return tuple(spelt)
