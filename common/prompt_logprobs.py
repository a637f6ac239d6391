"""Log probabilities of the tokens of a prompt, as columns: there can be hundreds of thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from common.errors import InvalidRequest

MAX_ENTRIES = 100_000
"""Log probabilities of the prompts of one request, likeliest tokens included: 0.8 MB of a message.

A router holds 7 to 15 MB for them.
"""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities of consecutive tokens of a prompt, each after all before it.

    `ranks[i]` is 1 where token i was the likeliest; among equals the lowest id comes first. The
    `num_top` likeliest tokens in the place of token i are entries `i * num_top` on of
    `top_token_ids` and `top_logprobs`, best first.
    """

    num_top: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def is_well_formed(self) -> bool:
        """Whether every column has as many entries as it must."""
        num_tops = len(self.logprobs) * self.num_top
        return (
            len(self.ranks) == len(self.logprobs)
            and len(self.top_token_ids) == len(self.top_logprobs) == num_tops
        )

    def top(self, index: int, count: int) -> tuple[tuple[int, float], ...]:
        """Return (token id, logprob) of the `count` likeliest tokens in the place of token `index`.

        There are no more than `num_top`.
        """
        first = index * self.num_top
        end = first + min(count, self.num_top)
        return tuple(zip(self.top_token_ids[first:end], self.top_logprobs[first:end], strict=True))


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Return the tokens of all parts, at least one, in order; all have as many likeliest tokens."""
    return PromptLogprobs(
        parts[0].num_top,
        tuple(chain.from_iterable(part.logprobs for part in parts)),
        tuple(chain.from_iterable(part.ranks for part in parts)),
        tuple(chain.from_iterable(part.top_token_ids for part in parts)),
        tuple(chain.from_iterable(part.top_logprobs for part in parts)),
    )


def num_entries(num_prompt_tokens: int, num_top: int) -> int:
    """Return how many log probabilities so many tokens of prompts have."""
    return num_prompt_tokens * (1 + num_top)


def check_num_entries(num_prompt_tokens: int, num_top: int, param: str = "prompt_logprobs") -> None:
    """Raise `InvalidRequest` for more log probabilities of prompts than one request may have.

    `param` is the field that asks for `num_top`.
    """
    count = num_entries(num_prompt_tokens, num_top)
    if count > MAX_ENTRIES:
        raise InvalidRequest(
            f"{param} is {num_top}, which makes {count} log probabilities of {num_prompt_tokens} "
            f"tokens of prompts: wanted at most {MAX_ENTRIES}, so shorter or fewer prompts",
            param=param,
        )
