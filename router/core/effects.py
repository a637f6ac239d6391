"""The effects of a request flow, which its shell performs. Frozen values, matched exhaustively."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.request import FinishReason, GenerationRequest
from router.core.generation import TokenChunk


@dataclass(frozen=True, slots=True)
class Choose:
    """Choose nodes for the request and answer with `on_choice` or `on_no_choice`, at once.

    With `decode` set that node holds a reservation, and only a prefill node is wanted; the answer
    then names the same decode node. Nodes in `excluded` were tried. `layout`: the fingerprint of
    the nodes that drew the last token of the answer; empty: it has none yet.
    """

    decode: Incarnation | None
    excluded: frozenset[Incarnation]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Answer with `on_waited` after `wait_s`. Meanwhile `on_node_trusted` may end the waiting."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Ask a decode or mixed node; answer with `on_reserve_reply` or `on_call_failed`.

    `prefill` is the node that will compute the prompt; a leg on it counts from now on, so that a
    burst is not sent to one node before the first reply. None: the decode node computes the prompt,
    whose tokens count there until `PromptComputed` or the end of the leg.
    With `may_wait` a full node queues the request instead of refusing it. `source` has more of the
    prompt than the node, if it computes that itself.
    """

    node: Incarnation
    request: GenerationRequest
    prefill: Incarnation | None
    may_wait: bool
    source: PrefixSource | None = None

    @property
    def must_prefill_locally(self) -> bool:
        """Whether the decode node computes the prompt."""
        return self.prefill is None


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Ask a prefill node; answer with `on_prefill_reply` or `on_call_failed`.

    `ticket` is that of the decode node, passed on unread; None when nothing is handed off. With
    `is_counted` the leg counts since `SendReserve`. `source` has more of the prompt than the node.
    """

    node: Incarnation
    request: GenerationRequest
    ticket: object | None
    is_counted: bool
    source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Abort this attempt on the node, which may hold blocks or tokens of it."""

    node: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class LegClosed:
    """The leg on this node, which `SendReserve` or `SendPrefill` counted, is over: one per leg.

    `has_prompt`: the tokens of the prompt counted on it until now.
    """

    node: Incarnation
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class PromptKept:
    """The decode node computes the prompt itself, for which a prefill node was planned: it counts
    there until `PromptComputed` or the end of the leg."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The decode or mixed node has computed the prompt, which does not count there any more."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class Accepted:
    """A node has begun the prompt: sent at most once, before any token. Failures may follow."""


@dataclass(frozen=True, slots=True)
class PlaceRecord:
    """The attempt runs here now, and why; a later record of the same attempt replaces it."""

    attempt: AttemptId
    decode: Incarnation | None
    prefill: Incarnation | None
    reason: str


@dataclass(frozen=True, slots=True)
class Unplace:
    """The attempt is over: remove its record, where there is one."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Finish:
    """The one outcome: an answer (STOP, LENGTH), or ABORT when the client left."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The one outcome: a typed failure."""

    error: PdserveError


Effect = (
    TokenChunk  # the next tokens for the client
    | Choose
    | Wait
    | SendReserve
    | SendPrefill
    | SendAbort
    | LegClosed
    | PromptKept
    | PromptComputed
    | Accepted
    | PlaceRecord
    | Unplace
    | Finish
    | Fail
)
