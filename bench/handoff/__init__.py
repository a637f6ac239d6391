"""How much of a handoff overlaps with the prefill: `python -m bench.handoff --json`.

prefill_end   the prefill node's process
decode_end    the decode node's process
slow_nodes    decode nodes that take KV slowly, beside it
paced_runner  a runner that takes the time of a large model
cpu_time      CPU seconds of a process, or of its threads that move KV
figures       figures of single handoffs
"""
