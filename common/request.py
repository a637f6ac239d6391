"""A client's request and a node's answer, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from common.errors import InvalidRequest
from common.grammar import Grammar
from common.ids import AttemptId
from common.kv.prompt_blocks import PromptBlocks
from common.prompt_logprobs import PromptLogprobs, check_num_entries
from common.token_rules import NO_RULES, TokenRules

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would leave float32's range. The largest logit
would be drawn anyway unless another one is within 1e-4 of it.
"""

_TOPS, _STOPS = f"0 to {MAX_LOGPROBS}", f"at most {MAX_STOP_TOKEN_IDS} ids"


class FinishReason(Enum):
    """Why a request ended. After `STOP` and `LENGTH` the answer is complete."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Token *i* of the output uses noise that depends on `(seed, i)` alone.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep everything. `logprobs` is the number
    of alternatives to report per token (0: the drawn token alone; None: nothing), and
    `prompt_logprobs` that of each token of the prompt after the first.
    `max_tokens` counts output tokens; the router always sets it. Before `min_tokens` of them no
    end-of-sequence token (with `ignore_eos` neither) and no stop token is drawn. The lower bound of
    `repetition_penalty` keeps logits finite. With a `grammar` only tokens that it allows are drawn,
    and it ends the output: the end-of-sequence token is allowed where the text is complete, and
    alone where nothing can follow, before `min_tokens` too. `rules` are about single tokens. Raises
    `InvalidRequest` for a value out of range, and for `ignore_eos`, bad words or allowed tokens
    with a grammar. The ranges that it tells are those of clients, whose `top_p` 0 and `top_k` -1
    the router writes in another way.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    grammar: Grammar | None = None
    rules: TokenRules = NO_RULES

    def __post_init__(self) -> None:
        tops, prompt_tops = self.logprobs, self.prompt_logprobs
        for name, is_good, wanted in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 to {max}, max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", self.top_k >= 0, "-1 or more (-1 and 0: all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "0 to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 10.0, "0.01 to 10"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "-2 to 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "-2 to 2"),
            ("seed", 0 <= self.seed < 2**64, "0 to 2^64 - 1"),
            ("logprobs", tops is None or 0 <= tops <= MAX_LOGPROBS, _TOPS),
            ("prompt_logprobs", prompt_tops is None or 0 <= prompt_tops <= MAX_LOGPROBS, _TOPS),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, _STOPS),
        ):
            if not is_good:
                found = getattr(self, name)
                value = len(found) if name == "stop_token_ids" else found
                said = f"{name} is {value}: wanted {wanted.format(max=self.max_tokens)}"
                raise InvalidRequest(said, param=name)
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos is true: wanted false with a grammar, which decides where the answer "
                "ends",
                param="ignore_eos",
            )
        for name in ("bad_words", "allowed_token_ids"):
            if self.grammar is not None and getattr(self.rules, name):
                raise InvalidRequest(
                    f"{name} cannot be combined with a grammar, which says itself what may follow",
                    param=name,
                )

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One choice of one client request, as a node gets it. `deadline_s` is the time that is left.

    A larger `priority` is more important, if nodes schedule by priority. Tokens in
    `output_token_ids` were answered by another node: the answer continues after them.
    `traceparent` names the parent of the node's spans; empty when the request is not traced. The
    KV of requests with another `cache_salt` is not used, nor the other way round. Raises
    `InvalidRequest` for a priority out of range, for a salt that is too long, for more log
    probabilities of the prompt than a message holds, or when no token is left to answer.
    """

    id: AttemptId
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    deadline_s: float
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()
    traceparent: str = ""
    cache_salt: str = ""
    known_blocks: PromptBlocks | None = field(default=None, repr=False, compare=False)
    """What is known of this very prompt already, for `prompt_blocks`."""

    @property
    def prompt_blocks(self) -> PromptBlocks:
        """The words of the prompt, as they are hashed and copied into a seat, and its hashes."""
        blocks = self.known_blocks
        if blocks is None or blocks.token_ids is not self.prompt_token_ids:
            blocks = PromptBlocks(self.prompt_token_ids)
            object.__setattr__(self, "known_blocks", blocks)
        return blocks

    def __post_init__(self) -> None:
        check_priority(self.priority)
        check_cache_salt(self.cache_salt)
        num_top = self.sampling.prompt_logprobs
        if num_top is not None:
            check_num_entries(len(self.prompt_token_ids), num_top)
        if len(self.output_token_ids) >= self.sampling.max_tokens:
            raise InvalidRequest(
                f"{len(self.output_token_ids)} tokens were answered already: wanted fewer than "
                f"max_tokens = {self.sampling.max_tokens}"
            )


def check_cache_salt(salt: str) -> None:
    """Raise `InvalidRequest` for a salt that is too long."""
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters: wanted at most {MAX_SALT_CHARS}",
            param="cache_salt",
        )


def check_priority(priority: int) -> None:
    """Raise `InvalidRequest` for a priority out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {priority}: wanted -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, before temperature and filters.

    `top` holds (token id, logprob) of the likeliest tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestCounts(NamedTuple):
    """What is counted for a request beside its tokens, so far.

    `num_cached_tokens` of its prompt were found in a prefix cache. `num_drafted` draft tokens were
    verified, and `num_accepted` of them became output.
    """

    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


NO_COUNTS = RequestCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDetails:
    """What an output has with token 0, with its end, or with log probabilities.

    With token 0, `queue_s` is how long the prompt waited on this node for its first step,
    `compute_s` the time from there to the token, and `prompt_logprobs` are those of the prompt, if
    the request asked for them.
    With `finish_reason` ERROR, `error_code` and `error_message` say why.
    """

    logprobs: tuple[TokenLogprobs, ...] = ()
    queue_s: float = 0.0
    compute_s: float = 0.0
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_message: str = ""
    prompt_logprobs: PromptLogprobs | None = None


NO_DETAILS = OutputDetails()
"""The details of almost every output."""


class RequestOutput(NamedTuple):
    """The output of one step for one request. A tuple, because there is one for every token.

    `first_index` is the output index of `token_ids[0]`; the router emits each index once.
    `is_started` means that this node now runs the sequence (on a decode node: the KV was verified).
    `counts` are those of this node; None: as in the output before.
    """

    id: AttemptId
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    is_started: bool = False
    counts: RequestCounts | None = None
    details: OutputDetails = NO_DETAILS
