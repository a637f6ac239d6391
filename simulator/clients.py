"""A trace's requests as a cluster sees them: prompts, limits, priorities.

A trace has the true length of an output; the client that asked did not know it. So a request
carries a `max_tokens` above its true length and ends by a stop token, and a reservation can only
guess. The model of clients: each picks one of `MAX_TOKENS_CHOICES` (or sets none, which allows
everything that fits the context) with equal chance; if that is less than the answer needs, it picks
the next larger. One in five requests is more important than the rest, one in five less.

Tokens are drawn without a model. A request's seed is the length of its answer, and `drawing` draws
its stop token there.

Prompts hold no text. Token ids are equal exactly where the trace has equal content (512-token
blocks of one hash id), and of a value of their own everywhere else.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.ids import AttemptId
from common.kv.prompt_blocks import PromptBlocks
from common.request import GenerationRequest, SamplingParams
from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest

MAX_TOKENS_CHOICES = (256, 512, 1024, 2048, 4096, None)
PRIORITY_CHOICES = (-1, 0, 0, 0, 1)
FILLER_TOKEN_ID = 0
STOP_TOKEN_ID = 1
_FIRST_PROMPT_TOKEN_ID = 2


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of the trace with its client's settings. `max_tokens` fits the context."""

    trace: TraceRequest
    index: int
    max_tokens: int
    priority: int

    def generation_request(self) -> GenerationRequest:
        """Return the request for a node; only live requests hold their prompt."""
        prompt = prompt_of(self.trace, self.index)
        return GenerationRequest(
            id=AttemptId(f"trace-{self.index}", 1),
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=0.0,
                seed=self.trace.num_output,
                stop_token_ids=(STOP_TOKEN_ID,),
                ignore_eos=True,
            ),
            deadline_s=float("inf"),
            priority=self.priority,
            known_blocks=prompt,
        )


def client_requests(
    requests: Sequence[TraceRequest], *, max_model_len: int, seed: int
) -> list[ClientRequest]:
    """Return all requests whose prompt and true output fit into `max_model_len`, in order.

    A client's settings depend on `seed` and its index in the trace alone.
    """
    clients = []
    for index, request in enumerate(requests):
        rng = random.Random(seed << 32 | index)
        picked = rng.choice(MAX_TOKENS_CHOICES)
        priority = rng.choice(PRIORITY_CHOICES)
        num_left = max_model_len - request.num_prompt
        if request.num_output <= num_left:
            max_tokens = min(_at_least(request.num_output, picked, num_left), num_left)
            clients.append(ClientRequest(request, index, max_tokens, priority))
    return clients


def _at_least(num_output: int, picked: int | None, num_left: int) -> int:
    if picked is None:
        return num_left
    larger = [c for c in MAX_TOKENS_CHOICES if c is not None and c >= max(picked, num_output)]
    return min(larger, default=num_left)


def prompt_of(request: TraceRequest, index: int) -> PromptBlocks:
    """Return a prompt of `num_prompt` token ids.

    Hash ids and indices both count from 0, so even and odd ids keep them apart.
    """
    if not request.hash_ids:
        own = (_FIRST_PROMPT_TOKEN_ID + 2 * index + 1,)
        return _runs_of(own, request.num_prompt, request.num_prompt)
    contents = (_FIRST_PROMPT_TOKEN_ID + 2 * hash_id for hash_id in request.hash_ids)
    return _runs_of(contents, TOKENS_PER_HASH_ID, request.num_prompt)


def _runs_of(token_ids: Iterable[int], num_each: int, num_tokens: int) -> PromptBlocks:
    """Return a prompt of `num_each` equal tokens, as many of the next one, and so on."""
    # The words are the tokens: a tuple of them takes twenty times as long.
    words = array("I")
    words.frombytes(np.repeat(np.fromiter(token_ids, np.uint32), num_each)[:num_tokens].tobytes())
    return PromptBlocks(words, words)
