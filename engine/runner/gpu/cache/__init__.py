"""The KV cache on a card, and its way to and from host memory.

pool       the cache itself
card_pool  what a connector does with it: sums, copies out of other caches, the ring
layer_ends where steps end, and which of them wrote a block
copies     blocks copied between the card and pinned memory, beside the steps
pinned     pinned memory that is used again
"""
