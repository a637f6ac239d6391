"""The KV cache on a card, and its way to and from host memory.

pool       the cache itself
card_pool  the cache as a connector's pool: sums, copies out of other caches, the ring
layer_ends the ends of steps, and the step that wrote each block last
copies     blocks copied between the card and pinned memory, beside the steps
pinned     pinned buffers for reuse
"""
