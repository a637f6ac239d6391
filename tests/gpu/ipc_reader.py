"""The other process of the stage `ipc`: opens the parent's memory and event, and copies."""

from __future__ import annotations

import sys

from tests.gpu.measuring import Card

if __name__ == "__main__":
    size, memory_handle, event_handle = int(sys.argv[1]), *map(bytes.fromhex, sys.argv[2:])
    card = Card()
    opened = card.device.open_memory(memory_handle, size)
    event = card.device.open_event(event_handle)
    event.delay(card.stream)
    own = card.device.allocate(size)
    spent = card.milliseconds(
        lambda: card.device.copy(own.address, opened.address, size, card.stream), 10
    )
    is_right = set(card.device.download(own.address, 1 << 20)) == {0x5A}
    print(f"opened, {round(2 * size / spent / 1e6)} GB/s, right: {is_right}")
    opened.close()
