"""The KV cache in numbers.

kv_layout     the shape of a KV cache, and its fingerprint
blocks        block arithmetic and block hashes
prompt_blocks the words of a prompt and the hashes of its blocks, made once
prefix_source where the start of a prompt is cached
tiers         where a node keeps blocks
token_budget  how many tokens a step, a sequence and a pool can hold
memory_plan   how a node's memory is divided into the largest step and the KV cache
"""
