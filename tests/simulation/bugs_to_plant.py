"""Bugs in the code that serves, each a piece of its source and what stands there instead."""

from __future__ import annotations

from typing import NamedTuple

from simulator.faults.kinds import FaultKind


class Bug(NamedTuple):
    """In `module`, `new` instead of `old`, which stands there once. `name` says what goes wrong.

    Histories with `faults` are to find it; empty: with faults of all kinds.
    """

    name: str
    module: str
    old: str
    new: str
    faults: tuple[FaultKind, ...] = ()


_BREAKS = (FaultKind.LOSS, FaultKind.REPEAT)
_BROKEN = (*_BREAKS, FaultKind.PARTITION, FaultKind.CRASH)

ROUTER = [
    Bug(
        "a chunk of tokens is emitted twice",
        "router.core.request_flow",
        "        self._out.append(chunk)\n        other",
        "        self._out += [chunk, chunk]\n        other",
    ),
    Bug(
        "a continued attempt goes on after other tokens than those that were emitted",
        "router.core.token_ledger",
        "        after.emitted = list(self.emitted)\n",
        "        after.emitted = [0 for _ in self.emitted]\n",
    ),
    Bug(
        "the loss of a node is not told to its requests",
        "router.core.request_flow",
        "        for attempt in self._attempts.on(node):\n",
        "        for attempt in ():\n",
    ),
    Bug(
        "a node that ends its stream in order counts as one that the request has lost",
        "router.core.request_flow",
        "        if is_orderly:\n",
        "        if is_orderly is None:\n",
    ),
    Bug(
        "no node counts as one that the request has lost",
        "router.core.candidates",
        "isinstance(error, NodeLost) and not isinstance(error, NodeAway)",
        "not isinstance(error, NodeLost)",
    ),
    Bug(
        "an attempt that ends does not abort its nodes",
        "router.core.attempts",
        "                effects += (SendAbort(node, self.id), self.close_leg(node))",
        "                effects += (self.close_leg(node),)",
    ),
    Bug(
        "a leg that ends is counted on",
        "router.core.attempts",
        "        if is_last:\n            effects.append(self.close_leg(node))",
        "        if is_last:\n            self.close_leg(node)",
    ),
    Bug(
        "a planned prefill node is counted on after it was not needed",
        "router.core.attempts",
        "        return [] if planned is None else [LegClosed(planned, has_prompt=True)]",
        "        return []",
    ),
    Bug(
        "the newer life of a node counts as replaced, and not the older one",
        "router.core.membership",
        "if incarnation.epoch < latest.get(incarnation.node_id, 0):",
        "if incarnation.epoch >= latest.get(incarnation.node_id, 0):",
    ),
    Bug(
        "the deadline of a request is not held",
        "router.core.request_flow",
        "if not self.is_done and now_s >= self._deadline_at_s:",
        "if not self.is_done and now_s >= 3 * self._deadline_at_s + 60:",
    ),
    Bug(
        "a token that was emitted is emitted again by the attempt that continues",
        "router.core.token_ledger",
        "        after.emitted = list(self.emitted)\n"
        "        after.num_emitted = after.num_before = self.num_emitted\n",
        "        after.emitted = list(self.emitted[:-1])\n"
        "        after.num_emitted = after.num_before = len(after.emitted)\n",
    ),
    Bug(
        "of two attempts that send tokens both go on",
        "router.core.request_flow",
        "        if other is not None:\n            self._drop(other)\n",
        "        if other is not None:\n            pass\n",
        (FaultKind.FREEZE, FaultKind.PARTITION),
    ),
    Bug(
        "a request does not know which nodes are suspected when it comes",
        "router.core.request_flow",
        "        self._attempts.suspects.update(suspects)\n",
        "        self._attempts.suspects.update({})\n",
        (FaultKind.CRASH, FaultKind.PARTITION),
    ),
    Bug(
        "the last node that decodes is given another role",
        "router.cluster.role",
        "    stops_decoding = role is Role.PREFILL\n",
        "    stops_decoding = False\n",
        (FaultKind.ROLE,),
    ),
    Bug(
        "the tokens of a prompt are not taken off when it is computed",
        "router.core.attempts",
        "        return [PromptComputed(decode)]",
        "        return []",
    ),
    Bug(
        "the tokens of a prompt are taken off twice",
        "router.core.attempts",
        "        self._has_prompt = False\n        return [PromptComputed(decode)]",
        "        return [PromptComputed(decode)]",
    ),
    Bug(
        "a prompt counts on the node that goes on with it too",
        "router.core.counted_legs",
        "num_prompt_tokens if prefill is None else 0)",
        "num_prompt_tokens)",
    ),
    Bug(
        "an attempt that ends before its first token leaves its prompt counted",
        "router.core.attempts",
        "        return LegClosed(node, had_prompt)",
        "        return LegClosed(node, has_prompt=False)",
    ),
    Bug(
        "a node whose role moved is to send KV to itself",
        "router.core.placement",
        " if one is not decode]",
        "]",
    ),
    Bug(
        "a node that refused a request is asked again",
        "router.core.placement",
        "_trusted_first(_without(fitting, excluded))",
        "_trusted_first(fitting)",
    ),
    Bug(
        "a session is known for longer than its time",
        "router.core.known.sessions",
        "+ self._ttl_s <= now_s:",
        "+ 2 * self._ttl_s <= now_s:",
    ),
    Bug(
        "a session forgets its prefill node where none was needed",
        "router.core.known.sessions",
        "            before.prefill if nodes.prefill is None else nodes.prefill,\n",
        "            nodes.prefill,\n",
    ),
    Bug(
        "nodes whose KV is another one are paired",
        "router.core.placement",
        "    return [node for node in prefillers if node.record.can_exchange_kv(decode.record)]\n",
        "    return [node for node in prefillers if node.record]\n",
        (FaultKind.UPGRADE,),
    ),
    Bug(
        "a session moves to another node without a reason",
        "router.core.policies.session_nodes",
        "    return held if is_near else None\n",
        "    return None\n",
    ),
]

HUNG = [
    Bug(
        "a node whose step hangs is not suspected",
        "router.core.membership",
        "        if stuck_s:\n",
        "        if stuck_s < 0:\n",
        (FaultKind.HANG,),
    ),
    Bug(
        "what a suspected node holds up is asked elsewhere once",
        "router.core.flow_actions",
        "        if self._attempts.second is None and self._attempts.is_held_up(self._main):\n",
        "        if self._attempts.second is None and self._attempts.is_done:\n",
        (FaultKind.HANG,),
    ),
]

ROLES = [
    Bug(
        "a node that was refused a role takes it",
        "node.control.role",
        "        if not is_done:\n",
        "        if not others:\n",
        (FaultKind.DRAIN, FaultKind.ROLE),
    ),
    Bug(
        "a leader closes an open change without telling the node",
        "router.cluster.role_keeper",
        "                await self._finish(router, leadership.last_move)\n",
        "                await self._store.end_move(router, leadership.last_move.number)\n",
        (FaultKind.FREEZE, FaultKind.PARTITION),
    ),
]

NODE = [
    Bug(
        "the attempts of a router that is gone are kept",
        "node.flow.node_flow",
        "e for one in self.attempts.of_router(router) for e in self._drop(one)",
        "e for one in self.attempts.of_router(router)[:0] for e in self._drop(one)",
    ),
    Bug(
        "an abort releases nothing",
        "node.flow.node_flow",
        "            elif attempt.router == message.router:\n",
        "            elif attempt.router != message.router:\n",
    ),
    Bug(
        "an aborted call gets no reply",
        "node.flow.node_flow",
        "*(AnswerCall(reply_to, gone) for reply_to in waiting), *self._release(attempt)",
        "*(AnswerCall(reply_to, gone) for reply_to in waiting[1:]), *self._release(attempt)",
    ),
    Bug(
        "a landing that is given up is not closed",
        "node.flow.decode",
        "        return [CloseLanding(lease_token)]\n",
        "        return []\n",
    ),
    Bug(
        "blocks in quarantine are not freed when their writer has stopped",
        "node.flow.decode",
        "            self._scheduler.end_quarantine(sequence)\n",
        "            pass\n",
    ),
    Bug(
        "decoding begins with another token than the one that was drawn",
        "node.flow.decode",
        "        first = self._scheduler.land(sequence, commit.first_token_id, draft",
        "        first = self._scheduler.land(sequence, commit.first_token_id ^ 2, draft",
    ),
    Bug(
        "a finished sequence stays in the table",
        "node.flow.decode",
        "            self._attempts.remove(attempt)\n        return [emit_tokens",
        "            pass\n        return [emit_tokens",
    ),
    Bug(
        "blocks are kept when their transfer has ended",
        "node.flow.prefill",
        "            self._scheduler.release(attempt.sequence)\n"
        "        attempt.outcome = attempt.outcome or HANDED_OFF",
        "            pass\n        attempt.outcome = attempt.outcome or HANDED_OFF",
    ),
    Bug(
        "a prompt is not committed",
        "node.flow.prefill",
        "        return [*effects, CommitTransfer(attempt.lease_token, commit)]",
        "        return effects",
    ),
    Bug(
        "the end of one router's stream ends the attempts of another one",
        "node.flow.attempts.attempt_table",
        "        return list(self._by_router.get(router, {}).values())",
        "        return [one for table in self._by_router.values() for one in table.values()]",
    ),
    Bug(
        "a prompt that waited for a pull is not queued when that has failed",
        "node.flow.pulls.prefix_pulls",
        "                attempt.num_pulled_tokens += pull.num_tokens\n"
        "            self._resume(attempt)",
        "                attempt.num_pulled_tokens += pull.num_tokens\n"
        "                self._resume(attempt)",
    ),
    Bug(
        "a pull of what was read from disk is not sent",
        "node.flow.disk.prefix_disk",
        "            if not wait.reads:\n"
        "                del self._waiting[waiter]\n"
        "                effects += wait.go_on()\n",
        "            if not wait.reads:\n"
        "                del self._waiting[waiter]\n"
        "                wait.go_on()\n",
    ),
    Bug(
        "a prompt that waited for a disk is not queued",
        "node.flow.disk.prefix_disk",
        "        self._resume(attempt)\n        return []",
        "        return []",
    ),
    Bug(
        "an idle node does not wake for the end of a copy",
        "node.flow.node_flow",
        "earliest_s(self._next_due_s(), self._copies.next_check_s(), self._disk.next_due_s())",
        "earliest_s(self._next_due_s(), self._disk.next_due_s())",
    ),
    Bug(
        "a node that drains leaves while its blocks may still be written",
        "node.flow.node_flow",
        "        held = self.scheduler.quarantined or self.scheduler.prefix_transfers",
        "        held = self.scheduler.prefix_transfers",
        (FaultKind.DRAIN, FaultKind.PARTITION, FaultKind.CRASH),
    ),
    Bug(
        "a node that drains gives up what has time to finish",
        "node.flow.node_flow",
        "            if attempt.waiting_replies\n",
        "            if attempt.waiting_replies or not attempt.is_over\n",
        (FaultKind.DRAIN,),
    ),
    Bug(
        "of a pull that came short all blocks count as cached",
        "node.flow.pulls.prefix_pulls",
        "        self._transfers.land(pull.coming, num_blocks)\n",
        "        self._transfers.land(pull.coming, len(pull.coming.block_ids))\n",
    ),
    Bug(
        "a node that drains goes on fetching parts of a pull",
        "node.flow.node_flow",
        "        self.pulls.end_fetching()\n",
        "        pass\n",
        (FaultKind.DRAIN,),
    ),
]

ENGINE = [
    Bug(
        "blocks are findable before they are computed",
        "engine.core.sequences.prefix_index",
        "        num_full = sequence.num_computed // self.block_size\n",
        "        num_full = sequence.num_known // self.block_size\n",
    ),
    Bug(
        "a cached block stays evictable while it is used",
        "engine.core.blocks.block_pool",
        "                del self._evictable[block_id]\n                self.num_taken",
        "                self.num_taken",
    ),
    Bug(
        "an evicted block can still be found",
        "engine.core.blocks.block_pool",
        "            self.prefix_cache.forget_all(evicted)\n            taken +=",
        "            taken +=",
    ),
    Bug(
        "received blocks are not quarantined",
        "engine.core.holdings",
        "            block_ids = [b for b in block_ids if b not in written]\n",
        "            block_ids = [b for b in block_ids if b not in written][:-1]\n",
    ),
    Bug(
        "KV of a wrong draft is kept",
        "engine.core.step.step_results",
        "        sequence.num_computed = sequence.num_known - 1\n        sequence.take_drafts",
        "        sequence.num_computed = sequence.num_known\n        sequence.take_drafts",
    ),
    Bug(
        "an answer may have one token too many",
        "engine.core.sequences.stop_rules",
        "min(max_tokens + num_prompt, max_model_len)",
        "min(max_tokens + num_prompt + 1, max_model_len)",
    ),
    Bug(
        "blocks of a prompt are freed while their transfer reads them",
        "engine.core.scheduler",
        "        self.finish(sequence, keep_blocks=sequence.is_exported)",
        "        self.finish(sequence)",
    ),
    Bug(
        "the last token of a prompt counts as cached",
        "engine.core.sequences.prefix_index",
        "        num_hashes = (sequence.num_known - 1) // self.block_size\n",
        "        num_hashes = sequence.num_known // self.block_size\n",
    ),
    Bug(
        "blocks are swapped in to the places of others",
        "engine.core.swapping",
        "            block_ids = sequence.block_table[num_found : len(sequence.host_block_ids)]\n",
        "            block_ids = sequence.block_table[num_found : len(sequence.host_block_ids)]"
        "[::-1]\n",
    ),
    Bug(
        "prefixes are copied back to the places of others",
        "engine.core.kept_prefixes",
        "            copy = PrefixCopy(block_ids, host_block_ids, hashes, is_out=False)\n",
        "            copy = PrefixCopy(block_ids, host_block_ids[::-1], hashes, is_out=False)\n",
    ),
    Bug(
        "a plan made ahead counts on blocks that are kept for a transfer since",
        "engine.core.prefix_transfers",
        "            self._on_taken()  # they cannot be evicted any more\n",
        "            pass\n",
    ),
    Bug(
        "prefixes in host memory give way while they are sent",
        "engine.core.prefix_transfers",
        "                host_block_ids.append(one - num_blocks)\n",
        "                pass\n",
    ),
    Bug(
        "prefixes that are read from disk are found under the names of others",
        "engine.core.disk_prefixes",
        "read.hashes[:num_done][::-1])",
        "read.hashes[:num_done])",
    ),
    Bug(
        "a read of a disk that fails keeps a block of host memory",
        "engine.core.disk_prefixes",
        "self._host_pool.release(read.host_block_ids[num_done:])",
        "self._host_pool.release(read.host_block_ids[num_done + 1 :])",
    ),
]

CARD = [
    Bug(
        "a sequence that a begun step has left behind goes on with it",
        "engine.core.step_after",
        "            self._entries.pop(step.sequences[entry].sequence_id, None)\n",
        "            pass\n",
    ),
    Bug(
        "a step is offered without blocks for its tokens",
        "engine.core.planning.going_on",
        "    lacking = seats.lacking(batch.rows[entries], known[entries] + 1, block_size)",
        "    lacking = seats.lacking(batch.rows[entries], known[entries], block_size)",
    ),
    Bug(
        "a step that has begun takes the places of its sequences for those of the step before",
        "engine.core.step_after",
        "        self._entries = {one.sequence_id: entry for entry, one in enumerate(going)}",
        "        self._entries = {one.sequence_id: n for n, one in enumerate(step.sequences)}",
    ),
]

FAILING = [
    Bug(
        "of the sequences of which a step has failed one goes on",
        "engine.step_loop",
        "            for entry, error in some.errors.items():\n",
        "            for entry, error in [*some.errors.items()][1:]:\n",
        (FaultKind.STEP,),
    ),
    Bug(
        "a prefix whose copy to host memory has failed is found there",
        "engine.core.kept_prefixes",
        "        elif is_good:\n            self._keep(copy)\n",
        "        elif is_good or True:\n            self._keep(copy)\n",
        (FaultKind.STEP,),
    ),
]

KV = [
    Bug(
        "the sender counts pieces as sent that were lost with the connection",
        "kv_transfer.sending.transfer",
        "            self.pending.extendleft(reversed(parts))",
        "            self.pending.extendleft(reversed(parts[1:]))",
    ),
    Bug(
        "the sender names the wrong generation",
        "kv_transfer.sending.machine",
        "begin = frames.Begin(transfer.token, transfer.ticket.generation)",
        "begin = frames.Begin(transfer.token, transfer.ticket.generation + 1)",
    ),
    Bug(
        "a peer that is silent is waited for",
        "kv_transfer.sending.link",
        "return self.asked_at_s is not None and now_s >= self.asked_at_s + limit_s",
        "return self.asked_at_s is not None and now_s >= self.asked_at_s + 100 * limit_s",
    ),
    Bug(
        "an acknowledgement that is due is not sent",
        "kv_transfer.receiving.sessions",
        "return is_much or self.num_acknowledged < self.num_wanted <= self.num_finished",
        "return is_much",
    ),
    Bug(
        "blocks of a landing that failed are not released",
        "kv_transfer.receiving.landings",
        "        return [*ended, Emit(Released(landing.token))]",
        "        return ended",
    ),
    Bug(
        "a connection that lost its session is not opened again",
        "kv_transfer.sending.machine",
        "                if code == frames.NO_SESSION:\n"
        "                    return self.on_link_lost(link.peer, now_s)",
        "                if code == frames.NO_SESSION:\n                    return []",
    ),
    Bug(
        "the receiver takes the right generation for an old one",
        "kv_transfer.receiving.machine",
        "        if landing.ticket.generation != data.generation:\n",
        "        if landing.ticket.generation == data.generation:\n",
    ),
    Bug(
        "a question of the sender does not renew the lease of its landing",
        "kv_transfer.receiving.machine",
        "                    if landing is not None and landing.session == session.id:\n",
        "                    if landing is not None and landing.session != session.id:\n",
        (FaultKind.ROLE,),
    ),
]

LANES = [
    Bug(
        "slots into which a read has failed are lent again before its address is removed",
        "kv_transfer.lanes.rdma.read_fences",
        "        if address not in (self._present, self._leaving):\n            return True",
        "        if address not in ():\n            return True",
        _BROKEN,
    ),
    Bug(
        "blocks of a landing that was given up are freed while a copy writes them",
        "kv_transfer.receiving.landings",
        "        if self._copies.is_under_way(_lease(landing)):\n            self._copies.hold",
        "        if self._copies.is_under_way((0, 0)):\n            self._copies.hold",
    ),
    Bug(
        "blocks that a sender writes by itself are freed at once when it is given up",
        "kv_transfer.receiving.landings",
        "        if landing.may_be_written and session is not None:\n",
        "        if landing.may_be_written and session is None:\n",
    ),
    Bug(
        "a sender reports that it writes no more before its last write has ended",
        "kv_transfer.sending.link",
        "        return [SendToPeer(self.peer, abort, is_behind_writes=True)]",
        "        return [SendToPeer(self.peer, abort)]",
    ),
    Bug(
        "a report on another connection than the one that was written on frees blocks",
        "kv_transfer.receiving.quarantine",
        "        if entry is None or entry.session != session:\n",
        "        if entry is None:\n",
        _BREAKS,
    ),
    Bug(
        "a landing that its sender writes by itself goes on over another connection",
        "kv_transfer.receiving.machine",
        "            landing.may_be_written or (will_be_written and is_copied)\n",
        "            will_be_written and is_copied\n",
        _BREAKS,
    ),
    Bug(
        "slots of a pulled frame are freed on the acknowledgement of the resend",
        "kv_transfer.sending.sent_slots",
        "            if sent.is_pulled or not is_first:\n",
        "            if not is_first:\n",
        _BREAKS,
    ),
    Bug(
        "a header is sent before the batch that writes its bytes has ended",
        "kv_transfer.lanes.rdma.batch_queue",
        "        if not (self._queue or self._under_way or self._is_telling):\n",
        "        if not (self._queue or self._is_telling):\n",
    ),
]

BUGS = [*ROUTER, *HUNG, *ROLES, *NODE, *ENGINE, *CARD, *FAILING, *KV, *LANES]
