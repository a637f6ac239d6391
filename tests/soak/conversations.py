"""Conversations of agents: a turn's prompt is all that was said before, so most of it is cached.

All begin with one of two system prompts. What is right was computed by a node that keeps no prefix
and gets none from another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path

from common.nodes import Role
from tests.support.cluster.api import COMPLETIONS, Api, Fields, tokens_of
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

NUM_CONVERSATIONS, NUM_TURNS = 12, 6
NUM_SYSTEMS, SYSTEM_TOKENS = 2, 100
NEW_TOKENS = (90, 17, 64, 33, 120, 50)
"""What each turn adds, besides the answer before it: most ends are not those of blocks."""
KEPT_TOKENS = 60
"""How much of its answer a conversation goes on with: some ask for less, and most for more."""


class Drawn(Enum):
    """How the tokens of a conversation are drawn."""

    GREEDY = "greedy turn"
    SAMPLED = "sampled turn"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation; its answer is the same each time."""

    conversation: int
    number: int
    prompt: tuple[int, ...]

    @property
    def shape(self) -> Drawn:
        """Half of the conversations are sampled."""
        return Drawn.SAMPLED if self.conversation % 2 else Drawn.GREEDY

    @property
    def path(self) -> str:
        """The endpoint."""
        return COMPLETIONS

    def fields(self, max_tokens: int, salt: str) -> Fields:
        """The body of a request, which names its conversation."""
        return {
            "prompt": list(self.prompt),
            "max_tokens": max_tokens,
            "temperature": 1.0 if self.shape is Drawn.SAMPLED else 0.0,
            "seed": 100 + self.conversation,
            "ignore_eos": True,
            "logprobs": 0,
            "prompt_cache_key": f"conversation {self.conversation}",
        }


def right_turns(
    model: Path, store: RedisServer, folder: Path, max_tokens: int
) -> dict[Turn, tuple[str, ...]]:
    """Every turn of every conversation with its longest answer, in order."""
    node = NodeSpec("alone", Role.MIXED, ("--no-enable-prefix-caching",))
    flags = ("--block-size", "16", "--num-threads", "1", "--kv-cache-memory", "16MiB")
    cluster = Cluster(
        ClusterSpec(name="reference", model=model, nodes=(node,), flags=flags), store, folder
    )
    try:
        cluster.start()
        cluster.wait_ready()
        with Api(cluster.url, model.name) as api:
            return dict(
                pair
                for conversation in range(NUM_CONVERSATIONS)
                for pair in _turns(api, conversation, max_tokens)
            )
    finally:
        cluster.close()


def following(turns: Iterable[Turn]) -> dict[Turn, Turn]:
    """The turn after each one that is not a conversation's last."""
    ordered = list(turns)
    return {
        one: later for one, later in pairwise(ordered) if one.conversation == later.conversation
    }


def _turns(api: Api, conversation: int, max_tokens: int) -> Iterator[tuple[Turn, tuple[str, ...]]]:
    said = prompt_tokens(SYSTEM_TOKENS, salt=900 + conversation % NUM_SYSTEMS)
    for number in range(NUM_TURNS):
        said += prompt_tokens(NEW_TOKENS[number], salt=1000 + 50 * conversation + number)
        turn = Turn(conversation, number, tuple(said))
        asked = {"model": api.model, "return_token_ids": True, **turn.fields(max_tokens, "right")}
        answer = api.http.post(turn.path, json=asked).raise_for_status().json()
        assert not answer["usage"]["prompt_tokens_details"]["cached_tokens"], "not computed"
        (choice,) = answer["choices"]
        yield turn, tuple(tokens_of(choice))
        said += choice["token_ids"][:KEPT_TOKENS]
