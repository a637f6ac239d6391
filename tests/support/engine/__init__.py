"""Engines without a model: sequences, policies and planners made by hand, and a runner that hashes.

build              requests, sequences and a small engine
choices            every policy, order, mode and method that there is
counting_device    a device that counts copies to it and reads from it
device_memory      memory that the processor is not given to read
fake_card          a pool on a card, in memory, its work under the test's control
hash_grammars      grammars over the tokens of `hash_runner`
hash_runner        a runner without a model that notices every KV mistake
keeping            a small engine with prefixes in host memory
mirrored_cache     a KV cache that plays to be on a device
moved_blocks       blocks that go from one card's cache to another's through rings
planner_views      sequences and pools for the planner, and `plan`
policy_views       sequences as policies see them
scripted_loop      a step loop whose flow, inbox and runner are scripted
speculation_views  sequences as a drafter sees them, and drafts without a drafter
tool_grammars      grammars of calls and thinking, over the same tokens
"""
