"""Perform the effects of a flow: answers to the control service, KV to the connector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.ids import Incarnation
from common.kv_layout import KVLayout
from common.request import RequestOutput
from kv_transfer.connector import KVConnector
from node.messages import (
    AbortTransfer,
    Answer,
    CheckStaged,
    CloseLanding,
    CommitTransfer,
    Drained,
    Effect,
    Emit,
    Message,
    OpenLanding,
    OpenTransfer,
    PushBlocks,
    Reply,
    Staged,
    StageIn,
)


class Answers(Protocol):
    """Takes the answers to waiting calls."""

    def resolve(self, reply_to: int, answer: Answer) -> None: ...


class Outputs(Protocol):
    """Takes the tokens for a router."""

    def add(self, router: Incarnation, output: RequestOutput) -> None: ...


class StagedCopy(Protocol):
    """A copy of landed blocks that was begun."""

    def is_done(self) -> bool:
        """Advance the copy without waiting; return whether steps can read the blocks."""


class StagedModel(Protocol):
    """Copies blocks between the cache and the memory that transfers read and write."""

    @property
    def layout(self) -> KVLayout: ...
    def stage_out(self, block_ids: Sequence[int]) -> None: ...
    @property
    def needs_staging(self) -> bool:
        """Whether steps read other memory than transfers write."""

    def begin_stage_in(self, block_ids: Sequence[int]) -> StagedCopy:
        """Begin to copy what landed in these blocks; neither side may change before it is done."""


class NodeEffects:
    """Performs effects on the step thread. No method that it calls waits for another party.

    `on_staged` takes a message for each copy of landed KV that has completed.
    """

    def __init__(
        self,
        connector: KVConnector,
        replies: Answers,
        streams: Outputs,
        model: StagedModel,
        *,
        on_drained: Callable[[], object],
        on_staged: Callable[[Message], object],
    ) -> None:
        self._connector = connector
        self._replies = replies
        self._streams = streams
        self._model = model
        self._on_drained = on_drained
        self._on_staged = on_staged
        self._copies: dict[int, StagedCopy] = {}
        """By lease token: copies of landed KV that are not known to be complete."""

    def perform_effect(self, effect: Effect) -> None:
        """Perform one effect."""
        match effect:
            case Emit(router, output):
                self._streams.add(router, output)
            case Reply(reply_to, answer):
                self._replies.resolve(reply_to, answer)
            case PushBlocks():
                self._push(effect)
            case OpenLanding(ticket):
                self._connector.expect(ticket, sender_deadline_s=ticket.lease_s)
            case StageIn(lease_token, block_ids):
                self._copies[lease_token] = self._model.begin_stage_in(block_ids)
            case CheckStaged():
                self._check_staged()
            case CloseLanding(lease_token):
                self._connector.revoke(lease_token)
            case OpenTransfer(ticket, deadline_s, priority):
                self._connector.open(ticket, deadline_s=deadline_s, priority=priority)
            case CommitTransfer(lease_token, commit):
                self._connector.commit(lease_token, commit)
            case AbortTransfer(lease_token):
                self._connector.abort(lease_token)
            case Drained():
                self._on_drained()

    def _check_staged(self) -> None:
        for lease_token in [token for token, copy in self._copies.items() if copy.is_done()]:
            del self._copies[lease_token]
            self._on_staged(Staged(lease_token))

    def _push(self, effect: PushBlocks) -> None:
        """Push blocks: the runner staged those of this step, earlier ones are staged here."""
        layers: Sequence[int]
        if effect.layer is None:
            self._model.stage_out(effect.source_blocks)
            layers = range(self._model.layout.num_layers)
        else:
            layers = (effect.layer,)
        for layer in layers:
            self._connector.push(
                effect.lease_token,
                layer=layer,
                ordinals=effect.ordinals,
                source_blocks=effect.source_blocks,
            )
