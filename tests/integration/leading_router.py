"""A router that does nothing but change roles: prints `leads` and each change that it was allowed.

python -m tests.integration.leading_router REDIS_URL NAME LEASE_S
"""

from __future__ import annotations

import asyncio
import sys

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from placement.redis_store import RedisStore


async def main(url: str, name: str, lease_s: float) -> None:
    store, me, led, mine = RedisStore(url, "leaders"), Incarnation(name, 1), False, 0
    while True:
        try:
            leadership = await store.lead(me, lease_s=lease_s)
            leads, last = leadership.leader == me, leadership.last_move
            # Another one may have led, and changed a role, since it asked last.
            if leads and (not led or (last is not None and last.number != mine)):
                print("leads", flush=True)
            led = leads
            if leads and last is not None and last.is_open:
                # The router that began it was frozen before it ended it.
                await store.end_move(me, last.number)
            # It asks as a router that believes to lead, whatever the store has just said.
            begun = await store.begin_move(me, Incarnation("n", 1), Role.DECODE)
            if begun is not None:
                mine = begun.number
                print(begun.number, flush=True)
                await store.end_move(me, begun.number)
        except PlacementUnavailable as away:
            print(f"away: {away}", flush=True)
        await asyncio.sleep(lease_s / 8)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
