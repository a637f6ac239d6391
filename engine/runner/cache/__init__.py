"""Where keys and values are: the cache, its copies, and the blocks that were swapped out.

contract       what the runner needs of a cache
kv_cache       the KV cache in one allocation
kv_formats     what it stores of a number
layers_out     reports a step's layers as they become readable
device_copies  copies KV between a device and host memory beside running steps
host_pool      blocks of swapped sequences and of prefixes in host memory

Decisions:

KV in few bits is stored by token, and computed in float32. With `--kv-cache-dtype int8` each head's
key or value of a token is bytes and one scale after them (`engine/runner/kernels/kv_slots.py`). A
scale per block or per channel would need fewer bytes, but a token's bytes would then depend on its
neighbours, and so on chunks, preemption and the prefix cache. Attention widens keys and values in
registers and then does the arithmetic of float32, so a row over an int8 cache has the bits of a row
over the widened cache in float32; that is how the kernels are tested. A step reads the keys of its
own rows from the cache too. Kernels take the cache as bytes and recognise the type by the size of a
slot: one compilation serves all types. Layout, handoff, swap and prefix cache only see blocks of
other sizes.

Of a cache on a card with kernels of this project connectors move the blocks themselves
(`engine/runner/gpu/cache/card_pool.py`), through a ring of slots in host memory where a lane needs
it, so steps and flows copy nothing for them. A cache on a device that Paddle computes in is
mirrored in host memory, and connectors move the mirror's bytes, as the rest of this describes:
Paddle has one current stream in a process, so the step thread begins all copies. KV of a step is
copied out after each layer, on a separate stream through pinned memory, and is sent when the copy
has ended. The thread that feeds the device stays at most a few layers ahead; otherwise everything
would be sent at the end.

Landings, cached prefixes that are sent, and swapped blocks are copied in one way
(`engine/runner/cache/device_copies.py`). A thread gathers from host memory into pinned memory and
writes from there; the step thread only begins the device's part, on a separate stream, and looks
whether it is complete. The flow gets a message at the end of each copy
(`node/flow/copies_under_way.py`). A landed sequence starts then. A cached prefix is pushed then,
also in the middle of a step, and its commit waits for that; a transfer that ends earlier keeps its
blocks until its copies have ended. Between two steps all of this may begin on the device; while a
step runs, only ends are looked at, because a process has one current stream. So the step thread
copies no KV in any direction, which a played device counts. It waits in one place, the end of a
step, for the copies of its last layers.
On a CPU the mirror is the cache itself and nothing is copied.
"""
