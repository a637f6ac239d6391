"""`--lengths PROMPT:OUTPUT`: how long prompts and answers are, in tokens."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from common.errors import ConfigError

FORMS = (
    "wanted PROMPT:OUTPUT in tokens, each a number (1000), a range (500-1500), "
    "or median~sigma of a lognormal (1000~0.8)"
)
_NUMBER, _RANGE = re.compile(r"(\d{1,8})"), re.compile(r"(\d{1,8})-(\d{1,8})")
_LOGNORMAL = re.compile(r"(\d{1,8})~(\d{1,2}(?:\.\d{1,4})?)")
_MOST_SIGMA = 3.0


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of lengths: from `low` to `high`, or with a median of `low` and a `sigma`."""

    low: int
    high: int
    sigma: float = 0.0

    def draw(self, rng: random.Random) -> int:
        """Return a length of at least one token."""
        if self.sigma:
            return max(1, round(rng.lognormvariate(math.log(self.low), self.sigma)))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and of answers, independent of each other."""

    prompt: Length
    output: Length

    def checked(self, max_model_len: int) -> Lengths:
        """Return these. Raises `ConfigError` where they do not fit a model's context."""
        longest = self.prompt.high + self.output.high
        if longest > max_model_len:
            what = "the median is" if self.prompt.sigma or self.output.sigma else "they reach"
            raise ConfigError(
                f"--lengths: {what} {longest} tokens in all: wanted at most {max_model_len}, which "
                "is what a node of this profile holds of one request"
            )
        return self


def lengths_of(text: str) -> Lengths:
    """Return what `--lengths` says. Raises `ConfigError`."""
    prompt, colon, output = text.partition(":")
    if not colon:
        raise ConfigError(f"--lengths is {text!r}: {FORMS}")
    return Lengths(_length(prompt, text), _length(output, text))


def _length(part: str, text: str) -> Length:
    if found := _NUMBER.fullmatch(part):
        length = Length(int(found[1]), int(found[1]))
    elif found := _RANGE.fullmatch(part):
        length = Length(int(found[1]), int(found[2]))
    elif (found := _LOGNORMAL.fullmatch(part)) and 0 < float(found[2]) <= _MOST_SIGMA:
        length = Length(int(found[1]), int(found[1]), float(found[2]))
    else:
        raise ConfigError(f"--lengths is {text!r}: {FORMS}")
    if not 1 <= length.low <= length.high:
        raise ConfigError(f"--lengths is {text!r}: wanted at least 1 token, and ranges that rise")
    return length
