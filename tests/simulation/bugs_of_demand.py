"""Bugs in what nodes refuse, hold and share, each a piece of its source and what stands there."""

from __future__ import annotations

from tests.simulation.bugs_to_plant import Bug

LOAD = [
    Bug(
        "no full node is asked to queue a request",
        "router.core.candidates",
        "        if not self._full:\n            return False\n",
        "        if self._full or not self._full:\n            return False\n",
    ),
    Bug(
        "the client is told the longest of the times after which to come again",
        "router.core.candidates",
        "min(error.retry_after_s, self._retry_after_s or math.inf)",
        "max(error.retry_after_s, self._retry_after_s or 0.0)",
    ),
    Bug(
        "nodes that refused are not asked again while a suspected one does not answer",
        "router.core.request_flow",
        "            self._candidates.forgive_refusals()\n",
        "            pass\n",
    ),
    Bug(
        "requests that wait for a pull do not count as waiting",
        "node.flow.attempts.attempt_queue",
        "        return len(self._held)\n",
        "        return len(self._compiling)\n",
    ),
    Bug(
        "a request is shed that finds no queue",
        "node.flow.attempts.shedding",
        "        if not waiting or request.output_token_ids:\n",
        "        if request.output_token_ids:\n",
    ),
    Bug(
        "a node without room refuses what may wait too",
        "node.flow.decode",
        "not sequence.has_remote_kv or message.may_wait or self",
        "not sequence.has_remote_kv or self",
    ),
]

DEMAND = [*LOAD]
