"""A node's load, as the placement store and the routers see it. Pure."""

from __future__ import annotations

from common.nodes import NodeLoad
from engine.core.scheduler import Scheduler


def current_load(
    scheduler: Scheduler, *, num_queued_tokens: int, num_held: int, is_draining: bool
) -> NodeLoad:
    """Return the load of a node as of now.

    Requests that wait for a grammar, a pull or a disk, `num_held`, are not queued yet.
    """
    counted, blocks = scheduler.counters, scheduler.pool.counts()
    return NodeLoad(
        free_blocks=scheduler.pool.num_available,
        free_seats=max(scheduler.num_free_seats, 0),
        num_running=len(scheduler.running) + len(scheduler.receiving),
        num_waiting=len(scheduler.waiting) + num_held,
        queued_tokens=num_queued_tokens,
        num_found_tokens=scheduler.waiting.num_found_tokens,
        new_token_ratio=scheduler.reservation.ratio,
        num_preemptions=counted.num_preemptions,
        num_recomputed_tokens=counted.num_recomputed_tokens,
        num_drafted=counted.num_drafted,
        num_accepted=counted.num_accepted,
        num_cached_blocks=blocks.cached,
        num_reserved_blocks=blocks.reserved,
        num_receiving_blocks=blocks.receiving,
        num_quarantined_blocks=blocks.quarantined,
        num_prefix_host_blocks=scheduler.host_pool.num_prefixes,
        num_prefix_disk_blocks=scheduler.disk_prefixes.size.num_blocks,
        num_steps=counted.num_steps,
        num_prompt_tokens=counted.num_chunk_tokens,
        prompt_steps_ms=round(1000 * counted.prompt_steps_s),
        decode_steps_ms=round(1000 * counted.decode_steps_s),
        is_draining=is_draining,
    )
