"""Which prefixes host memory should give up first: traces replayed over a pool and a tier below it.

chains    traces as the blocks of each prompt: published ones, and that of a generator
orders    orders of eviction: of what was used least recently, S3-FIFO, cost × chance, the future
tiers     a pool with host memory below it, by blocks alone
"""
