"""Perform the effects of a flow: answers to the control service, KV to the connector."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from common.kv.kv_layout import KVLayout
from engine.core.blocks.cache_copy import CacheCopy, CopyUnderWay
from engine.core.blocks.disk_jobs import DiskJob, OnResult
from kv_transfer.contract import KVConnector
from node.flow.messages import (
    AbortTransfer,
    Answer,
    AnswerCall,
    AskBlocks,
    BeginCopy,
    BeginDisk,
    CheckCopies,
    CloseLanding,
    CommitTransfer,
    CopyEnded,
    DiskEnded,
    Drained,
    Effect,
    Message,
    OfferBlocks,
    OpenLanding,
    OpenTransfer,
    PushBlocks,
    RefusePull,
    SendOutput,
)

log = logging.getLogger("pdserve.node")


class Answers(Protocol):
    """Receives the answers to waiting calls."""

    def resolve(self, reply_to: int, answer: Answer) -> None: ...


class Outputs(Protocol):
    """Receives the outputs for routers."""

    def add(self, sent: SendOutput) -> None: ...
    def offer(self, offered: OfferBlocks) -> None:
        """Pass on an offer of blocks for a node that stays."""

    def ask(self, wanted: AskBlocks) -> None:
        """Pass on a request for blocks to another node."""

    def refuse(self, refused: RefusePull) -> None:
        """Pass on the refusal of another node's pull."""


class StagedModel(Protocol):
    """Copies blocks between the cache of a device and host memory."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def needs_staging(self) -> bool:
        """Whether steps read other memory than transfers write."""

    def begin_copy(self, copy: CacheCopy) -> CopyUnderWay:
        """Begin a copy; never called unless `needs_staging`."""


class BlockDisk(Protocol):
    """Reads and writes files of blocks beside everything else."""

    def begin(self, job: DiskJob, on_result: OnResult) -> object:
        """Begin a job; `on_result` is called with its end, on any thread."""


class NodeEffects:
    """Performs effects on the step thread. No method that it calls waits for another party.

    `on_copied` takes a message for each copy and each job on `disk` that has ended. Without a disk
    there must be no effect for one.
    """

    def __init__(
        self,
        connector: KVConnector,
        replies: Answers,
        streams: Outputs,
        model: StagedModel,
        *,
        on_drained: Callable[[], object],
        on_copied: Callable[[Message], object],
        disk: BlockDisk | None = None,
    ) -> None:
        self._connector = connector
        self._replies = replies
        self._streams = streams
        self._model = model
        self._on_drained = on_drained
        self._on_copied = on_copied
        self._disk = disk
        self._copies: dict[int, tuple[BeginCopy, CopyUnderWay]] = {}
        """Copies by number that are not known to have ended, in the order of their begin."""

    def perform_effect(self, effect: Effect) -> None:
        """Perform one effect."""
        match effect:
            case SendOutput():
                self._streams.add(effect)
            case AskBlocks():
                self._streams.ask(effect)
            case RefusePull():
                self._streams.refuse(effect)
            case OfferBlocks():
                self._streams.offer(effect)
            case AnswerCall(reply_to, answer):
                self._replies.resolve(reply_to, answer)
            case PushBlocks():
                if self._copies:
                    # A step runs, and pushes should not wait for its end.
                    self._check_copies(may_begin=False)
                self._push(effect)
            case OpenLanding(ticket):
                self._connector.expect(ticket, sender_deadline_s=ticket.lease_s)
            case BeginCopy():
                self._begin_copy(effect)
            case CheckCopies():
                self._check_copies(may_begin=True)
            case BeginDisk(number, job):
                assert self._disk is not None, "there is no disk"
                self._disk.begin(job, lambda result: self._on_copied(DiskEnded(number, result)))
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

    def _begin_copy(self, effect: BeginCopy) -> None:
        try:
            copy = self._model.begin_copy(effect.copy)
        except Exception as error:
            self._end_copy(effect, error)
        else:
            self._copies[effect.number] = effect, copy

    def _check_copies(self, *, may_begin: bool) -> None:
        for effect, copy in list(self._copies.values()):
            try:
                is_done = copy.is_done(may_begin=may_begin)
            except Exception as error:
                self._end_copy(effect, error)
            else:
                if is_done:
                    self._end_copy(effect, None)

    def _end_copy(self, effect: BeginCopy, error: Exception | None) -> None:
        self._copies.pop(effect.number, None)
        if error is not None:
            log.error("a copy of %d KV blocks failed: %r", len(effect.copy.block_ids), error)
        elif effect.push is not None:
            self._push(effect.push)
        self._on_copied(CopyEnded(effect.number, error))

    def _push(self, effect: PushBlocks) -> None:
        """Push blocks that transfers can read."""
        every = range(self._model.layout.num_layers)
        for layer in every if effect.layer is None else (effect.layer,):
            self._connector.push(
                effect.lease_token,
                layer=layer,
                ordinals=effect.ordinals,
                source_blocks=effect.source_blocks,
            )
