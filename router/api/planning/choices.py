"""The choices of a request: how many, how much each gets, and how it draws.

Prompts set bounds. Without `max_tokens` a chat may use the rest of the context. With `best_of` more
choices run than are returned. A sampling parameter that the request leaves out takes the model's
own value from generation_config.json, else OpenAI's (temperature 1, top_p 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.errors import InvalidRequest
from common.prompt_logprobs import check_num_entries
from common.request import SamplingParams
from common.token_rules import MAX_BAD_WORDS, ThinkingBudget, TokenRules
from router.api.bodies.asked import Asked, AskedOutput, AskedSampling, MaxTokens
from router.api.planning.answer_syntax import AnswerRules
from router.text.context_limits import output_limit
from router.text.text_model import TextModel, filters_of_nodes
from router.tools.answer_parser import AnswerSyntax
from router.tools.harmony.message_cut import Place, text_before_thought
from router.tools.harmony.tags import END_TAG
from router.tools.thinking import ThinkingFormat

MAX_CHOICES = 128
"""Most choices of one request, over all its prompts."""
MAX_ANSWER_LOGPROBS = 200_000
"""Log probabilities of all choices of one request, those of the likeliest tokens included: at most
18 MB of JSON, and 30 MB of objects until it is made. As many make a chat of 9,523 tokens with 20
likeliest ones each, or 128 choices of 1,562 tokens."""
MAX_REPEATED_TOKENS = 2_000_000
"""Tokens of prompts that the choices of one answer repeat, as text or as ids: 10 MB."""
MAX_WORDS = MAX_BAD_WORDS // 2
MAX_WORD_CHARS = 128
_MAX_ID_DIGITS = 10


class PlannedOutput(NamedTuple):
    """Choices of each prompt: how many run, how many the client gets, and how many find the log
    probabilities of the prompt.

    `max_tokens`: the most tokens of a choice, of each prompt. `logprobs` and `prompt_logprobs` are
    what nodes find, `echo_logprobs` what is shown of a prompt that is echoed. Without `has_output`
    a prompt alone is asked for. Where `is_cut_to_fit`, of each prompt, the client set no limit, or
    one that is more than this prompt leaves room for: an answer may have fewer than `max_tokens`.
    """

    choices_per_prompt: int
    returned_per_prompt: int
    scored_per_prompt: int
    max_tokens: Sequence[int]
    has_output: bool
    is_cut_to_fit: Sequence[bool]
    logprobs: int | None
    prompt_logprobs: int | None
    echo_logprobs: int | None


def planned_output(asked: Asked, lengths: Sequence[int], max_model_len: int) -> PlannedOutput:
    """Return how much is run and found for prompts of these lengths, in tokens.

    Raises `InvalidRequest` for more than a request may have, and `ContextExceeded`.
    """
    wish = asked.output
    choices_per_prompt = _choices_per_prompt(wish, len(lengths))
    scored_per_prompt = 1 if wish.is_chat else choices_per_prompt
    # Which choices are the best is found from the probabilities of their tokens.
    found = 0 if wish.logprobs is None and choices_per_prompt > wish.n else wish.logprobs
    echoed = wish.logprobs if wish.is_echo else None
    scored = echoed if wish.prompt_logprobs is None else max(wish.prompt_logprobs, echoed or 0)
    if wish.is_echo or asked.shape.returns_token_ids:
        _check_repeated(wish, 1 if wish.is_chat else wish.n, sum(lengths))
    has_output = _has_output(wish, can_be_0=wish.is_echo or scored is not None)
    num_left = max_model_len - min(lengths)
    num_choices = choices_per_prompt * len(lengths)
    limit = _within_logprobs(wish, choices_per_prompt, num_choices, found, num_left)
    if scored is not None:
        param = "prompt_logprobs" if wish.prompt_logprobs == scored else "logprobs"
        check_num_entries(scored_per_prompt * sum(lengths), scored, param)
    param = "messages" if wish.is_chat else "prompt"
    most = [
        output_limit(
            length,
            limit.asked if has_output else 1,
            max_model_len=max_model_len,
            default=limit.default,
            prompt_param=param,
            max_tokens_param=limit.param,
            min_tokens=wish.min_tokens,
        )
        for length in lengths
    ]
    return PlannedOutput(
        choices_per_prompt=choices_per_prompt,
        returned_per_prompt=wish.n,
        scored_per_prompt=scored_per_prompt,
        max_tokens=most,
        has_output=has_output,
        is_cut_to_fit=[limit.asked is None or one < limit.asked for one in most],
        logprobs=found,
        prompt_logprobs=scored,
        echo_logprobs=echoed,
    )


def _choices_per_prompt(wish: AskedOutput, num_prompts: int) -> int:
    """Return how many choices of each prompt run."""
    n, best_of = wish.n, wish.best_of
    if not 1 <= n * num_prompts <= MAX_CHOICES or n < 1:
        raise InvalidRequest(
            f"n is {n} for {num_prompts} prompt(s): wanted 1 to {MAX_CHOICES} choices in all",
            param="n",
        )
    if best_of is None:
        return n
    if not n <= best_of <= MAX_CHOICES // num_prompts:
        raise InvalidRequest(
            f"best_of is {best_of} with n {n} and {num_prompts} prompt(s): wanted n or more, and "
            f"at most {MAX_CHOICES} choices in all",
            param="best_of",
        )
    return best_of


def _check_repeated(wish: AskedOutput, num_choices: int, num_tokens: int) -> None:
    """Raise `InvalidRequest` when the choices of each prompt repeat too many of its tokens."""
    count = num_choices * num_tokens
    if count > MAX_REPEATED_TOKENS:
        field = "echo" if wish.is_echo else "return_token_ids"
        raise InvalidRequest(
            f"{field} is true, with which {num_choices} choice(s) of each prompt repeat {count} "
            f"tokens of prompts: wanted at most {MAX_REPEATED_TOKENS}, so fewer choices or shorter "
            "prompts",
            param=field,
        )


def _has_output(wish: AskedOutput, *, can_be_0: bool) -> bool:
    """Return whether tokens are asked for; with `can_be_0` a prompt alone can be."""
    param = wish.max_tokens.param
    if wish.max_tokens.asked != 0:
        return True
    if not can_be_0:
        or_0 = f", or 0 with {' or '.join(wish.scored_by)}" if wish.scored_by else ""
        raise InvalidRequest(f"{param} is 0: wanted at least 1{or_0}", param=param)
    if wish.min_tokens:
        raise InvalidRequest(
            f"min_tokens is {wish.min_tokens}: wanted 0 where {param} is 0", param="min_tokens"
        )
    return False


def _within_logprobs(
    wish: AskedOutput, best_of: int, num_choices: int, num_top: int | None, num_left: int
) -> MaxTokens:
    """Return the most tokens, of which all choices have no more log probabilities than they may.

    Each token has `num_top` + 1 of them; None: it has none. Without a number of its own a request
    gets the tokens that may have them. No choice has more than `num_left` tokens.
    """
    limit = wish.max_tokens
    if num_top is None:
        return limit
    most = MAX_ANSWER_LOGPROBS // (num_choices * (1 + num_top))
    asked, param, default = limit.asked, limit.param, limit.default
    if asked is None:
        return limit._replace(default=most if default is None else min(default, most))
    if min(asked, num_left) > most:
        cause = f"{'top_logprobs' if wish.is_chat else 'logprobs'} {num_top}"
        if wish.logprobs is None:  # only the best of several is then found by them
            cause = f"best_of {best_of}"
        made = f"more than {MAX_ANSWER_LOGPROBS}"
        if asked <= MAX_ANSWER_LOGPROBS:  # a product of more digits may be too long to show
            made = str(asked * num_choices * (1 + num_top))
        raise InvalidRequest(
            f"{param} is {asked}, which with {cause} makes {made} log probabilities of "
            f"{num_choices} choice(s): wanted at most {MAX_ANSWER_LOGPROBS}, so {param} of at most "
            f"{most}",
            param=param,
        )
    return limit


def planned_sampling(
    asked: AskedSampling,
    output: PlannedOutput,
    answer: AnswerRules,
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
        thinking=_budget(asked.thinking_budget, max(output.max_tokens), answer.syntax, model),
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
        grammar=answer.grammar,
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


def _budget(
    num_tokens: int | None, most: int, syntax: AnswerSyntax, model: TextModel
) -> ThinkingBudget | None:
    """Return where thinking of more than `num_tokens` ends; None: nowhere among the first `most`.

    Without a token for the last tag nodes could not tell an answer that thinks from one that has
    thought.
    """
    if num_tokens is None or num_tokens >= most or not syntax.thinks:
        return None
    begin, end_tag = _beginning_of_thinking(syntax, model), syntax.tags.end
    if syntax.place is not Place.NONE:
        end_tag = END_TAG
    end = model.chat.tag_tokens.get(end_tag, model.vocab_size)
    if begin is None or max((end, *begin)) >= model.vocab_size:
        return None
    return ThinkingBudget(num_tokens=num_tokens, end_token_id=end, begin_token_ids=begin)


def _beginning_of_thinking(syntax: AnswerSyntax, model: TextModel) -> tuple[int, ...] | None:
    """Return the tokens with which an answer begins to think, none where the prompt has them.

    None: it does not think, or no token begins that.
    """
    if syntax.place is not Place.NONE:
        before = text_before_thought(syntax.place)
        return None if before is None else model.spelt(before)
    if syntax.thinking is ThinkingFormat.BEGUN:
        return ()
    begin = model.chat.tag_tokens.get(syntax.tags.begin)
    return None if begin is None else (begin,)


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
