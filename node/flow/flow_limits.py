"""The requests that a node accepts: it refuses those that it could never answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import InvalidRequest, PoolExhausted
from common.kv.blocks import blocks_for
from common.request import GenerationRequest
from engine.core.planner_contract import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """What a node accepts; with `sheds`, no request that would end after its deadline.

    Without `has_grammars` no request with a grammar: its answer would not follow it.
    """

    vocab_size: int
    max_model_len: int
    max_queued_requests: int
    sheds: bool = False
    has_grammars: bool = False

    def problem_with(
        self, request: GenerationRequest, step: StepLimits, num_blocks: int
    ) -> InvalidRequest | None:
        """Return why a node with these steps and blocks can never answer a request, or None."""
        length = len(request.prompt_token_ids) + len(request.output_token_ids)
        if length >= self.max_model_len:
            return InvalidRequest(
                f"the {_known(request)} {length} tokens: this node takes at most "
                f"{self.max_model_len - 1}, so that one can follow",
                param="prompt",
            )
        # A prompt that could never be seated must not be queued. KV is never written past the
        # longest sequence.
        num_needed = blocks_for(
            min(length + step.tokens_per_seq, step.max_model_len), step.block_size
        )
        if num_needed > num_blocks:
            return InvalidRequest(
                f"the {_known(request)} {length} tokens: with the {step.tokens_per_seq} of the "
                f"first step it needs {num_needed} KV blocks of {step.block_size} tokens, and "
                f"this node has {num_blocks}",
                param="prompt",
            )
        highest = int(np.frombuffer(request.prompt_blocks.words, np.uint32).max())
        highest = max(highest, max(request.output_token_ids, default=0))
        highest_ruled = request.sampling.rules.highest_token_id
        if max(highest, highest_ruled) >= self.vocab_size:
            return InvalidRequest(
                f"token id {max(highest, highest_ruled)} is not in the vocabulary of "
                f"{self.vocab_size}",
                param="prompt" if highest >= self.vocab_size else None,
            )
        if request.sampling.grammar is not None and not self.has_grammars:
            return InvalidRequest(
                "this node does not follow grammars: its model has no tokenizer.json, or no "
                "end-of-sequence token"
            )
        return None


def _known(request: GenerationRequest) -> str:
    return "prompt and its answer so far have" if request.output_token_ids else "prompt has"


def why_starved(num_tokens: int, num_blocks: int) -> PoolExhausted:
    """Return why a running request of so many tokens ends: it can never get its next block."""
    return PoolExhausted(
        f"the request has {num_tokens} tokens and needs another KV block: this node's "
        f"{num_blocks} blocks are in use, and nothing is left to preempt"
    )
