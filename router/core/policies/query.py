"""What a placement policy sees beside the nodes: the request, and the router's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidRequest, Overloaded
from common.kv.blocks import BlockKey, block_keys, root_hash
from common.kv.prompt_blocks import PromptBlocks
from common.nodes import NodeRecord
from common.request import SamplingParams
from router.core.known.block_index import BlockIndex
from router.core.known.node_view import NodeView
from router.core.known.sessions import NO_NODES, SessionId, SessionNodes

MAX_HASHED_BLOCKS = 8192
"""The most blocks of a prompt that a choice looks up, and that one pull brings."""


class TooLong(InvalidRequest):
    """No node holds the prompt and the longest answer: the longest one holds `longest` tokens."""

    def __init__(self, message: str, *, longest: int) -> None:
        super().__init__(message, param="max_tokens")
        self.longest = longest


class NoneStays(Overloaded):
    """No node that stays can decode: each of them drains, or none is heard."""


@dataclass(slots=True)
class Query:
    """The request to place. The keys of its blocks are computed once per layout, when asked for.

    With `needs_grammars` only nodes that follow grammars can take it, with `needs_token_rules`
    those that know rules about tokens and salts, and with `needs_prompt_logprobs` those that answer
    with log probabilities of the prompt. `last` are the nodes of the request before it in its
    `session`. `layout` is the fingerprint of the nodes that drew the answer so far; empty: it has
    no token yet.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: int
    needs_grammars: bool = False
    needs_token_rules: bool = False
    needs_prompt_logprobs: bool = False
    cache_salt: str = ""
    session: SessionId = b""
    last: SessionNodes = NO_NODES
    layout: str = ""
    blocks: PromptBlocks | None = None
    """The prompt's blocks, if the caller has them already."""
    known_keys: dict[tuple[str, int], tuple[BlockKey, ...]] = field(default_factory=dict)
    """The keys already computed, by the fingerprint and the block size of a node."""

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and of the longest answer."""
        return len(self.prompt_token_ids) + self.max_tokens

    def fits(self, record: NodeRecord) -> bool:
        """Return whether a node is made for a request this long."""
        return self.num_tokens <= record.max_model_len

    def is_followed_by(self, record: NodeRecord) -> bool:
        """Return whether a node knows all that is asked; another one would ignore it."""
        return (
            (record.has_grammars or not self.needs_grammars)
            and (record.has_token_rules or not self.needs_token_rules)
            and (record.has_prompt_logprobs or not self.needs_prompt_logprobs)
        )

    def goes_on_at(self, record: NodeRecord) -> bool:
        """Return whether a node draws the tokens that those before it would have drawn."""
        return self.layout in ("", record.fingerprint)

    def block_keys(self, record: NodeRecord) -> tuple[BlockKey, ...]:
        """Return the keys of the prompt's full blocks as this node cuts them, the first
        `MAX_HASHED_BLOCKS`."""
        layout = (record.fingerprint, record.block_size)
        found = self.known_keys.get(layout)
        if found is None:
            blocks = self.blocks or PromptBlocks(self.prompt_token_ids)
            root = root_hash(record.fingerprint, self.cache_salt)
            hashes = blocks.hashes_behind(root, record.block_size, MAX_HASHED_BLOCKS)
            found = self.known_keys[layout] = block_keys(hashes[:MAX_HASHED_BLOCKS])
        return found


def query_of(
    prompt: PromptBlocks,
    sampling: SamplingParams,
    cache_salt: str,
    session: SessionId = b"",
    *,
    needs_salt: bool = True,
) -> Query:
    """Return what a request asks of the nodes that can take it.

    Without `needs_salt` they need not know salts. Nor need they know budgets of thinking: a node of
    the release before ignores them, as all of that release did.
    """
    return Query(
        prompt.token_ids,
        sampling.max_tokens,
        needs_grammars=sampling.grammar is not None,
        needs_token_rules=(needs_salt and bool(cache_salt)) or sampling.rules.are_everywhere,
        needs_prompt_logprobs=sampling.prompt_logprobs is not None,
        cache_salt=cache_salt,
        session=session,
        blocks=prompt,
    )


@dataclass(slots=True)
class PolicyState:
    """The router's memory between placements; placement writes it, policies only read it."""

    turn: int = 0
    blocks: BlockIndex = field(default_factory=BlockIndex)


Policy = Callable[[Sequence[NodeView], Query, PolicyState], list[float]]
"""Scores from 0 to 1, one per node, higher is better. Nodes come in any order and never empty."""
