"""Where the nodes of a running cluster have found the starts of prompts that they computed."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx

from bench.agents.processes import configurations
from bench.running_cluster import RunningCluster, samples_of

TIERS = ("pool", "host", "disk")
PULLED = "pulled_tokens"
_FOUND = 'pdserve_prefix_blocks_found_total{{tier="{}"}}'
_NAMES = {_FOUND.format(tier): tier for tier in TIERS} | {
    "pdserve_prefix_pulled_tokens_total": PULLED
}


async def found_by_tier(cluster: RunningCluster) -> Counter[str]:
    """Return blocks found by tier, and tokens pulled, of all nodes there are that compute prompts.

    What was pulled is in the pool when it is found. Nodes that have left are not counted.
    """
    headers = _headers(configurations(cluster.pid))
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        for address in await cluster.prefill_metrics():
            reply = await client.get(f"http://{address}/metrics", headers=headers)
            found += counted(samples_of(reply.raise_for_status().text))
    return found


def counted(samples: Mapping[str, float]) -> Counter[str]:
    """Return what a node's samples say of prefixes."""
    return Counter({_NAMES[one]: int(value) for one, value in samples.items() if one in _NAMES})


def _headers(paths: Iterable[Path]) -> dict[str, str]:
    """Return what opens the metrics of nodes with these configurations."""
    for path in paths:
        keys = tomllib.loads(path.read_text()).get("security", {}).get("keys", "")
        token = Path(keys) / "metrics.token"
        if keys and token.exists():
            return {"Authorization": f"Bearer {token.read_text().strip()}"}
    return {}
