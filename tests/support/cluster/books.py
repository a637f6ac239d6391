"""What nodes and the store hold for requests: after every test, nothing.

The facts come from where they are kept: a node's own metrics, the keys out of Redis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.files.keys_folder import Keys
from common.nodes import NodeRecord
from engine.core.blocks.block_pool import BlockCounts

_CALL_TIMEOUT_S = 30.0
_METRICS = tuple(
    f"pdserve_{name}"
    for name in (
        "kv_blocks",
        "running_sequences",
        "waiting_sequences",
        "open_transfers",
        "swapped_blocks",
        "steps_total",
        "preemptions_total",
        "draft_tokens_total",
        "accepted_tokens_total",
        "plans_ahead_total",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What a node held and had counted at the end of its latest turn."""

    num_blocks: int
    blocks: BlockCounts
    num_running: int
    num_waiting: int
    num_transfers: int
    num_host_blocks: int
    num_steps: int
    num_preemptions: int
    num_drafted: int
    num_accepted: int
    num_planned_ahead: int

    @classmethod
    def parse(cls, record: NodeRecord, metrics: str) -> Self:
        """Read the text of the node's `/metrics`."""
        # The parser takes longer for the other lines than a node does for a request.
        own = "\n".join(line for line in metrics.splitlines() if line.startswith(_METRICS))
        by_label: dict[str, dict[str, int]] = {}
        for family in text_string_to_metric_families(own + "\n"):
            for sample in family.samples:
                label = next(iter(sample.labels.values()), "")
                by_label.setdefault(sample.name, {})[label] = int(sample.value)
        total = {name: sum(values.values()) for name, values in by_label.items()}
        return cls(
            num_blocks=record.num_blocks,
            blocks=BlockCounts(**by_label["pdserve_kv_blocks"]),
            num_running=total["pdserve_running_sequences"],
            num_waiting=total["pdserve_waiting_sequences"],
            num_transfers=total["pdserve_open_transfers"],
            num_host_blocks=total["pdserve_swapped_blocks"],
            num_steps=total["pdserve_steps_total"],
            num_preemptions=total["pdserve_preemptions_total"],
            num_drafted=total["pdserve_draft_tokens_total"],
            num_accepted=total["pdserve_accepted_tokens_total"],
            num_planned_ahead=by_label["pdserve_plans_ahead_total"]["taken"],
        )

    def held(self) -> list[str]:
        """What the node holds for requests, in words; empty when every block is free or cached."""
        blocks = self.blocks
        counts = {
            "running blocks": blocks.running,
            "reserved blocks": blocks.reserved,
            "receiving blocks": blocks.receiving,
            "quarantined blocks": blocks.quarantined,
            "running sequences": self.num_running,
            "waiting sequences": self.num_waiting,
            "transfers": self.num_transfers,
            "host blocks of no prefix": self.num_host_blocks,
        }
        held = [f"{count} {what}" for what, count in counts.items() if count]
        total = sum(blocks)
        if total != self.num_blocks:
            held.append(f"{total} blocks in its counts, and {self.num_blocks} in its record")
        return held


class NodeBooks:
    """Reads the metrics of one life of a node; close it."""

    def __init__(self, record: NodeRecord, keys: Keys | None = None) -> None:
        """`keys` are a router's."""
        self.record = record
        headers = {"authorization": f"Bearer {keys.metrics_token}"} if keys else {}
        self._http = httpx.Client(headers=headers, timeout=_CALL_TIMEOUT_S)

    def read(self) -> Books:
        """Raises `httpx.TransportError` when the node does not answer."""
        reply = self._http.get(f"http://{self.record.metrics_address}/metrics")
        reply.raise_for_status()
        return Books.parse(self.record, reply.text)

    def close(self) -> None:
        self._http.close()
