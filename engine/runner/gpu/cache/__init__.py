"""The KV cache on a card, and its way to and from host memory.

pool     the cache itself, with its bytes for transfers in host memory
copies   blocks copied between the card and pinned memory, beside the steps
pinned   pinned memory that is used again
"""
