"""A cache on the card read by another process: what the driver does, and the lane `ipc`."""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from common.errors import HandoffFailed
from common.ids import AttemptId, Incarnation
from engine.runner.gpu.cache.card_pool import specs_of
from engine.runner.gpu.cache.copies import copy_specs
from engine.runner.gpu.cache.pool import GpuCache
from kv_transfer.lanes.ipc.descriptors import fetch_descriptor
from tests.gpu import ipc_sender
from tests.gpu.ipc_sender import cache_of, connector_of, content_of
from tests.gpu.stages.model import Findings

SENDER = [sys.executable, "-m", "tests.gpu.ipc_sender"]
_PEER_TIMEOUT_S = 5.0
_ROUNDS = 8
"""How often a number of prompts is handed over; the first time is not counted."""


def ipc(card: Any, found: Findings) -> None:
    """Copies out of another process's cache, and what becomes of them when that process dies."""
    layout = ipc_sender.LAYOUT
    kernels = [card.kernel(spec) for spec in specs_of(layout.piece_bytes)]
    for spec in copy_specs(layout.piece_bytes):  # Those of the ring and of swapping compile.
        card.kernel(spec)
    if not card.is_real:
        return
    with closing(cache_of(card, layout)) as cache:
        _copied_from_another(card, cache, kernels, found)


def _copied_from_another(card: Any, cache: GpuCache, kernels: list[Any], found: Findings) -> None:
    layout, blocks = ipc_sender.LAYOUT, ipc_sender.NUM_BLOCKS
    content = content_of(layout)
    size = content.nbytes
    with _sender() as (sender, place):
        descriptor = fetch_descriptor(bytes.fromhex(place["nonce"]))
        opened = cache.card_pool.open(descriptor, place["bytes"], place["blocks"])
        os.close(descriptor)
        own = card.device.allocate(size)
        source, target = opened.memory.address, cache.pool.address
        device, stream = card.device, card.stream
        rates: dict[str, float] = {}
        for name, origin in (("own", own.address), ("opened", source)):
            spent = card.milliseconds(lambda: device.copy(target, origin, size, stream))  # noqa: B023
            rates[name] = 2 * size / spent / 1e6
            found[f"ipc_copy_{name}_gb_s"] = round(rates[name])
        for count in (ipc_sender.PROMPT_BLOCKS, blocks):
            for name, kernel in zip(("summed", "copied"), kernels, strict=False):
                launches = _layers(card, kernel, cache, source, count)
                spent = card.graph_milliseconds(launches)
                moved = 2 * count * layout.block_bytes
                rate = moved / spent / 1e6
                found[f"ipc_kernel_{name}_{count}_gb_s"] = round(rate)
                found[f"ipc_kernel_{name}_{count}_share_of_a_copy"] = round(rate / rates["own"], 3)
        own.close()
        print({key: found[key] for key in found if key.startswith("ipc_")}, flush=True)
        free_before = device.memory()[0]
        for _ in range(200):
            device.copy(target, source, size, stream)
        sender.kill()
        sender.wait()
    found["ipc_is_right_when_killed"] = _is(card, cache, content)
    device.fill(target, 0, size, stream)
    device.copy(target, source, size, stream)
    found["ipc_is_right_after_death"] = _is(card, cache, content)
    opened.close()
    device.synchronize(stream)
    found["ipc_freed_mb"] = (device.memory()[0] - free_before) >> 20
    print({key: found[key] for key in found if key.startswith("ipc_")}, flush=True)
    assert found["ipc_is_right_when_killed"]
    assert found["ipc_is_right_after_death"]


def _layers(
    card: Any, kernel: Any, cache: GpuCache, source: int, count: int
) -> list[Callable[[int], None]]:
    """Return a launch for each layer, of the first `count` blocks to the last ones."""
    ids = np.arange(2 * cache.num_blocks, dtype=np.int32).reshape(2, -1) % cache.num_blocks
    parts = -(-cache.layout.piece_bytes // (16 << 10))
    memory = card.device.allocate(ids.nbytes + 16 * count * parts)
    card.device.upload_array(memory.address, ids)
    at, size = memory.address, ids.nbytes // 2
    layer_bytes = cache.layout.layers[0].num_bytes * cache.num_blocks
    return [
        kernel.bind(
            (count, parts, 2), source + layer * layer_bytes, at, cache.pool.keys(layer), at + size,
            at + 2 * size, cache.num_blocks, cache.num_blocks,
        )
        for layer in range(cache.layout.num_layers)
    ]  # fmt: skip


def _is(card: Any, cache: GpuCache, content: np.ndarray) -> bool:
    card.device.synchronize(card.stream)
    held = np.frombuffer(card.device.download(cache.pool.address, content.nbytes), np.uint8)
    return bool(np.array_equal(held, content))


@contextmanager
def _sender() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Start another process with a cache; give where it offers its memory."""
    pipe = subprocess.PIPE
    with subprocess.Popen(SENDER, stdin=pipe, stdout=pipe) as sender:
        try:
            assert sender.stdout is not None
            yield sender, json.loads(sender.stdout.readline())
        finally:
            sender.kill()


def ipc_lane(card: Any, found: Findings) -> None:
    """Whole handoffs between two processes on one card, then one whose sender is killed."""
    layout, per_prompt = ipc_sender.LAYOUT, ipc_sender.PROMPT_BLOCKS
    for spec in specs_of(layout.piece_bytes):
        card.kernel(spec)
    if not card.is_real:
        return
    content = content_of(layout)
    cache = cache_of(card, layout)
    connector, events = connector_of(cache, "d", is_offered=False)
    with closing(cache), closing(connector):
        with _sender() as (sender, _):
            for count in (1, 4):
                taken = [
                    _handoffs(sender, connector, events, 10 * count + number, count)
                    for number in range(_ROUNDS)
                ][1:]
                best, median = min(taken), statistics.median(taken)
                moved = 2 * count * per_prompt * layout.block_bytes
                found[f"ipc_lane_{count}_ms"] = [round(1e3 * best, 2), round(1e3 * median, 2)]
                found[f"ipc_lane_{count}_gb_s"] = round(moved / median / 1e9, 1)
            found["ipc_lane_is_right"] = _is(card, cache, content)
            found["ipc_lane_checksum_failures"] = connector.statistics().checksum_failures
            print({key: found[key] for key in found if key.startswith("ipc_lane")}, flush=True)
            _kill(sender, connector, events, found)
        with _sender() as (sender, _):
            card.device.fill(cache.pool.address, 0, content.nbytes, card.stream)
            card.device.synchronize(card.stream)
            _handoffs(sender, connector, events, 900, 4)
            found["ipc_lane_is_right_after_death"] = _is(card, cache, content)
    print({key: found[key] for key in found if key.startswith("ipc_lane")}, flush=True)
    assert found["ipc_lane_is_right"]
    assert found["ipc_lane_is_right_after_death"]


def tickets_for(connector: Any, number: int, count: int) -> list[Any]:
    """Open a landing for each prompt, at the places that it has in the sender's cache."""
    from kv_transfer.contract import Ticket

    size, layout = ipc_sender.PROMPT_BLOCKS, ipc_sender.LAYOUT
    tickets = [
        Ticket(
            attempt=AttemptId(f"r{number}-{place}", 0), decode_node=Incarnation("d", 1),
            kv_endpoint=connector.endpoint, lease_token=8 * number + place + 1, generation=1,
            target_block_ids=tuple(range(place * size, (place + 1) * size)), num_cached_tokens=0,
            fingerprint=layout.fingerprint, lease_s=30.0,
        )
        for place in range(count)
    ]  # fmt: skip
    for ticket in tickets:
        connector.expect(ticket, sender_deadline_s=30.0)
    return tickets


def _handoffs(sender: Any, connector: Any, events: Any, number: int, count: int) -> float:
    """Hand over so many prompts at a time; return the seconds until the last has landed."""
    from kv_transfer.contract import Landed

    tickets = tickets_for(connector, number, count)
    begun = time.monotonic()
    sender.stdin.write(pickle.dumps(tickets))
    sender.stdin.flush()
    for _ in tickets:
        event = events.get(timeout=30)
        assert isinstance(event, Landed), event
    taken = time.monotonic() - begun
    errors = json.loads(sender.stdout.readline())
    assert not errors, errors
    return taken


def _kill(sender: Any, connector: Any, events: Any, found: Findings) -> None:
    """Kill the sender while its prompts are copied; every landing ends, and nothing else does."""
    from kv_transfer.contract import Landed, LandingFailed, Released

    tickets = tickets_for(connector, 800, 4)
    before = connector.statistics().bytes_received
    sender.stdin.write(pickle.dumps(tickets))
    sender.stdin.flush()
    while connector.statistics().bytes_received == before:
        pass
    sender.kill()
    begun = time.monotonic()
    open_tokens, kinds = {ticket.lease_token for ticket in tickets}, []
    while open_tokens:
        event = events.get(timeout=4 * _PEER_TIMEOUT_S)
        kinds.append(type(event).__name__)
        if isinstance(event, Landed | Released):
            open_tokens.remove(event.lease_token)
        else:
            assert isinstance(event, LandingFailed), event
            assert isinstance(event.error, HandoffFailed)
    found["ipc_lane_killed"] = sorted(kinds)
    found["ipc_lane_released_after_s"] = round(time.monotonic() - begun, 2)
    assert connector.statistics().blocks_quarantined == 0
