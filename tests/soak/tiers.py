"""What the tiers of a soak have moved, and whether routers know what nodes hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clocks.waiting import wait_until
from tests.support.cluster.cluster import Cluster

AGREE_TIMEOUT_S = 30.0
_MOST_SHOWN = 600
_MAY_BE_NONE = ("pulls_failed", "on_disk", "in_own_files")


@dataclass(frozen=True, slots=True)
class Moved:
    """What a node has moved in its present life, and what it holds. Pulls are not of one block."""

    copied_out: int
    copied_in: int
    pulled: int
    pulls_failed: int
    in_pool: int
    in_host_memory: int
    on_disk: int
    in_own_files: int


def moved(cluster: Cluster) -> dict[str, Moved]:
    """Read every node's metrics."""
    return {node.node_id: _moved(_samples(cluster, node.node_id)) for node in cluster.spec.nodes}


def _samples(cluster: Cluster, node_id: str) -> dict[tuple[str, str], int]:
    address = cluster.record(node_id).metrics_address
    text = httpx.get(f"http://{address}/metrics").raise_for_status().text
    return {
        (sample.name.removeprefix("pdserve_"), next(iter(sample.labels.values()), "")): int(
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _moved(samples: Mapping[tuple[str, str], int]) -> Moved:
    return Moved(
        copied_out=samples["prefix_blocks_copied_total", "out"],
        copied_in=samples["prefix_blocks_copied_total", "in"],
        pulled=samples["prefix_pulls_total", "landed"],
        pulls_failed=samples["prefix_pulls_total", "failed"],
        in_pool=samples["kv_blocks", "cached"],
        in_host_memory=samples["prefix_host_blocks", ""],
        in_own_files=samples["prefix_disk_blocks", "this"],
        on_disk=sum(value for (name, _), value in samples.items() if name == "prefix_disk_blocks"),
    )


def still_complaints(tiers: Mapping[str, Moved]) -> list[str]:
    """Complain of each way that no block has gone: such a soak shows nothing."""
    ways = [field.name for field in fields(Moved) if field.name not in _MAY_BE_NONE]
    return [
        f"no node has anything {way}"
        for way in ways
        if not any(getattr(one, way) for one in tiers.values())
    ]


def index_complaints(cluster: Cluster) -> list[str]:
    """Complain if the routers do not soon know of the same blocks, and of those that nodes hold.

    Nobody asks any more. Two nodes may hold one block, and one may have it in two tiers.
    """
    tiers = moved(cluster).values()
    least = max(one.in_pool for one in tiers)
    most = sum(one.in_pool + one.in_host_memory + one.on_disk for one in tiers)

    def agree() -> bool:
        known = _known_blocks(cluster)
        return len(set(known)) == 1 and least <= known[0] <= most

    try:
        wait_until(agree, "the routers know what nodes hold", timeout_s=AGREE_TIMEOUT_S)
    except AssertionError:
        return [
            f"the routers know of {_known_blocks(cluster)} blocks, nodes hold {least} to {most}"
        ]
    return []


def _known_blocks(cluster: Cluster) -> list[int]:
    return [
        int(sample.value)
        for url in cluster.urls
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        for sample in family.samples
        if sample.name == "pdserve_router_known_blocks"
    ]


def unbalanced(folder: Path) -> list[str]:
    """Complain of the logs in which a node's books did not balance."""
    complaints = []
    for log in sorted(folder.glob("*.log")):
        _, found, after = log.read_text(errors="replace").partition("AssertionError")
        if found:
            complaints.append(f"{log.name}: {found}{after[:_MOST_SHOWN]}")
    return complaints
