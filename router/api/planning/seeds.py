"""The seeds of a request's choices, and the choices that differ in them alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import InvalidRequest

if TYPE_CHECKING:
    from router.api.planning.request_plan import ChoicePlan


def first_seed(draw_seed: Callable[[], int], asked: int | None) -> int:
    """Return the seed of a prompt's first choice: the one that is asked for, or a drawn one.

    Raises `InvalidRequest` for one of more than 64 bits.
    """
    if asked is None:
        return draw_seed()
    if not -(2**63) <= asked < 2**64:
        raise InvalidRequest("seed is out of range: wanted 64 bits", param="seed")
    return asked % 2**64


def choices_like(first: ChoicePlan, count: int, *, is_chat: bool) -> list[ChoicePlan]:
    """Return the choices of a prompt, which draw with other seeds than the `first`.

    A chat shows the log probabilities of its prompt once: its other choices do not find them.
    """
    one = first.sampling
    num_top = None if is_chat else one.prompt_logprobs
    return [first] + [
        replace(
            first,
            sampling=replace(one, seed=seed_of_choice(one.seed, i), prompt_logprobs=num_top),
        )
        for i in range(1, count)
    ]


def seed_of_choice(seed: int, index: int) -> int:
    """Return the unsigned 64-bit seed of choice `index`; choice 0 keeps `seed`."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
