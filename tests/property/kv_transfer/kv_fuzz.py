"""Frames by the hundred thousand against decoder and machines: kv_fuzz --frames N --seed S

Most go to the decoder, the rest to machines whose oracles know what is legal. No frame may raise
anything but `PeerProtocolError`, none may be believed that is not legal, and memory must not grow
with their number. Prints what it did as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from tests.property.kv_transfer.frame_mutator import decode, mutated
from tests.property.kv_transfer.receiver_fuzz import ReceiverFuzz
from tests.property.kv_transfer.sender_fuzz import SenderFuzz

# What the books of both machines, all remembered outcomes and the allocator's slack may take.
MOST_GROWTH_BYTES = 32 << 20
WARM_UP_FRAMES = 5_000
CHECK_EVERY = 500


def run(num_frames: int, seed: int) -> dict[str, object]:
    """Run the frames; `AssertionError` when an oracle is contradicted or memory grew."""
    rng = random.Random(seed)
    receiver, sender = ReceiverFuzz(rng), SenderFuzz(rng)
    num_decoded = 0
    began_s = time.process_time()
    grown_from = 0
    for number in range(num_frames):
        if number == min(WARM_UP_FRAMES, num_frames // 2):
            grown_from = resident_bytes()
        where = rng.random()
        strange = decode(mutated(rng)) if where < 0.6 else None
        num_decoded += strange is not None
        # A strange frame costs its connection, so few of them reach the machines.
        if where < 0.003 or 0.6 <= where < 0.85:
            receiver.step(strange)
        if 0.003 <= where < 0.006 or where >= 0.85:
            sender.step(strange)
        if number % CHECK_EVERY == 0:
            receiver.check_bounds()
            sender.check_bounds()
    grown = resident_bytes() - grown_from
    assert grown < MOST_GROWTH_BYTES, f"{grown} bytes more after {num_frames} frames"
    return {
        "frames": num_frames,
        "strange_frames_decoded": num_decoded,
        "receiver": receiver.counts,
        "sender": sender.counts,
        "cpu_s": round(time.process_time() - began_s, 1),
        "grown_bytes": grown,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.frames, arguments.seed)))


if __name__ == "__main__":
    main()
