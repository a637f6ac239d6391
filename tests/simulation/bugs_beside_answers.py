"""Bugs in what is beside the tokens of answers: what routers know and tell, what is counted, log
probabilities, copies, and further connections; each a piece of its source and its substitute."""

from __future__ import annotations

from simulator.faults.kinds import FaultKind
from tests.simulation.bugs_to_plant import Bug

_STANDING = (FaultKind.FREEZE, FaultKind.PARTITION)
_BREAKS = (FaultKind.LOSS, FaultKind.REPEAT)

KNOWN = [
    Bug(
        "a node of many that refused a request is asked again",
        "router.core.shortlist",
        "(node for group in groups for node in group), excluded)\n",
        "(node for group in groups for node in group), frozenset())\n",
    ),
    Bug(
        "an idle node of many that does not answer is not suspected",
        "router.dispatch.liveness.node_liveness",
        "        self._is_due = self._is_due or number > 0\n",
        "        self._is_due = number > 0 and self._is_due\n",
        _STANDING,
    ),
    Bug(
        "a node that has one request less is looked at as before",
        "router.core.membership",
        "                self._used.discard(incarnation)\n"
        "            self._busier[incarnation] = None\n",
        "                self._used.discard(incarnation)\n",
    ),
    Bug(
        "a node that has become full is drawn as one with a free seat",
        "router.core.known.roster",
        "        and view.is_full is earlier.is_full\n",
        "        and view.load is not None\n",
    ),
    Bug(
        "a listing that was asked for before a role was told takes it back",
        "router.core.membership",
        "        if member.role_told_at == self._num_asked:\n",
        "        if member.role_told_at > self._num_asked:\n",
        (FaultKind.ROLE,),
    ),
    Bug(
        "the blocks of a node that is lost are known on",
        "router.core.placement",
        "        self._placer.on_lost(node)\n",
        "        pass\n",
    ),
    Bug(
        "a block that leaves one tier of a node is forgotten in all",
        "router.core.known.block_index",
        "            if other and name is not tier:\n",
        "            if other and name is tier:\n",
    ),
    Bug(
        "a node of which two requests have ended counts as unused",
        "router.core.membership",
        "            if not member.own.num_requests:\n                self._used",
        "            if member.own.num_requests < 2:\n                self._used",
    ),
]

TOLD = [
    Bug(
        "the placement of an attempt that its nodes have ended stays in the store",
        "router.core.attempts",
        "        if self._is_placed:\n",
        "        if self._is_placed and effects:\n",
    ),
    Bug(
        "each attempt without a token is accepted anew",
        "router.core.flow_actions",
        "        if not self._is_accepted:\n",
        "        if not self._main.has_first_token:\n",
    ),
    Bug(
        "a token that no draft has proposed counts as one",
        "engine.core.step.step_results",
        "            num_accepted = min(len(output.token_ids), num_drawn - 1)\n",
        "            num_accepted = min(len(output.token_ids), num_drawn)\n",
    ),
    Bug(
        "an answer that ends among drafts has the log probabilities of the last ones",
        "engine.core.step.step_results",
        "        logprobs = drawn.logprobs[: len(kept)]\n",
        "        logprobs = drawn.logprobs[-len(kept) :]\n",
    ),
    Bug(
        "a prompt whose log probabilities are asked for is taken out of the cache",
        "engine.core.sequences.sequence",
        "        return asked and not self.has_remote_kv and self",
        "        return asked and self.has_remote_kv and self",
    ),
]

HELD_UP = [
    Bug(
        "an answer that has begun ends with the node that gives it",
        "router.core.flow_actions",
        "    return is_the_nodes and not isinstance(error, PeerProtocolError)\n",
        "    return is_the_nodes and isinstance(error, PeerProtocolError)\n",
    ),
    Bug(
        "a request ends with its second failure",
        "router.core.candidates",
        "        return self._num_failures >= MAX_FAILURES\n",
        "        return self._num_failures >= 2\n",
    ),
    Bug(
        "a second attempt goes on that a suspected node holds up too",
        "router.core.request_flow",
        "attempts.is_held_up(attempts.second):\n            self._drop(attempts.second)\n",
        "attempts.is_held_up(attempts.second):\n            pass\n",
        _STANDING,
    ),
    Bug(
        "a node that is heard and not reached is trusted again",
        "router.core.membership",
        "        elif unreached:\n",
        "        elif unreached and is_new:\n",
        _STANDING,
    ),
    Bug(
        "a prompt is sent to a node that was suspected after it was planned there",
        "router.core.request_flow",
        "            avoided = self._candidates.excluded.union(self._attempts.suspects)\n",
        "            avoided = self._candidates.excluded\n",
        _STANDING,
    ),
]

QUEUED = [
    Bug(
        "requests that were read fill the inbox on",
        "node.flow.inbox",
        "            self._num_requests = self._num_beside = 0\n            return taken",
        "            self._num_beside = 0\n            return taken",
    ),
    Bug(
        "a request that was refused while it waited cannot be asked again",
        "node.flow.node_flow",
        "            self.attempts.reopen(attempt.id)\n",
        "            pass\n",
    ),
    Bug(
        "it is not counted how often a request was passed",
        "engine.core.sequences.waiting_queue",
        "            sequence.num_bypassed += len(bypassed.get(sequence.sequence_id, ()))\n",
        "            sequence.num_bypassed += 0\n",
    ),
]

ORDER = [
    Bug(
        "a token that overtakes the first one is dropped",
        "router.core.token_ledger",
        "            if not self.has(index):\n                self._held[index] = token\n",
        "            if self.has(index):\n                self._held[index] = token\n",
    ),
    Bug(
        "an answer that ends before its first token has come goes on",
        "router.core.token_ledger",
        "        self._end, self._reason = end, reason\n",
        "        self._end, self._reason = end + 1, reason\n",
    ),
]

COPIES = [
    Bug(
        "a preempted sequence whose copy to host memory has failed goes on with it",
        "engine.core.swapping",
        "        elif not is_good and sequence.host_block_ids is copy.host_block_ids:\n",
        "        elif is_good and sequence.host_block_ids is not copy.host_block_ids:\n",
        (FaultKind.STEP,),
    ),
    Bug(
        "a tried plan is taken for another request than it was tried for",
        "engine.core.tried_plan",
        "        self._is_queued = sequence is self._sequence\n",
        "        self._is_queued = True\n",
        _STANDING,
    ),
]

CONNECTIONS = [
    Bug(
        "a piece that was lost with a further connection is not sent again",
        "kv_transfer.sending.link",
        "                self.transfers[token].requeue(chunks)\n",
        "                self.transfers[token].requeue(chunks)\n"
        "                self.transfers[token].pending.popleft()\n",
        _BREAKS,
    ),
    Bug(
        "a transfer is spread over connections before its receiver knows it",
        "kv_transfer.sending.machine",
        "link.lane not in ONE_SIDED_LANES, False\n",
        "link.lane not in ONE_SIDED_LANES, True\n",
    ),
    Bug(
        "a further connection that broke is not opened again",
        "kv_transfer.sending.channels",
        "            if now_s < self._retry_at_s:\n",
        "            if now_s < self._retry_at_s + 3600:\n",
        _BREAKS,
    ),
    Bug(
        "a connection on which a transfer waits is closed as idle",
        "kv_transfer.sending.link",
        "        return not self.transfers and now_s >= self._idle_since_s + self._limits.idle_s",
        "        return now_s >= self._idle_since_s + self._limits.idle_s",
    ),
]

BESIDE = [*KNOWN, *TOLD, *HELD_UP, *QUEUED, *ORDER, *COPIES, *CONNECTIONS]
