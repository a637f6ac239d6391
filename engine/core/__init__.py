"""Scheduling without I/O: sequences, blocks, plans. No clock, no thread, no framework.

scheduler       the one writer of sequences and blocks: events in, a planned step out
planner         what one step runs: a pure function of these:
  step_plan       what it reads and the decision it returns
  step_budget     tokens, blocks and seats that are left in one step
  decode_plan     the decoding sequences of a step, and which are preempted
  chunk_plan      the prefill chunks of a step: which prompt gets how many tokens
  chunk_work      the work of a chunk: tokens, and pairs that attend
  admission_plan  which waiting sequences are admitted
holdings        what sequences hold, from the queue to the end: seats and blocks
plan_ahead      a plan made while the step before runs, and whether it can be taken
  forecast        what the state will be when that step has ended
plan            a step as the runner sees it
step_batch      the sequences of one step, as arrays and one by one
prompt_rows     rows of a step that say how likely a prompt is
planned_step    a step on its way to the runner, and its outcome on the way back
step_results    what a step drew, written into its sequences
running         the running sequences, by arrival
seats           the seated sequences as arrays, changed in place
sequence        one stream of tokens on one node
status          the life of a sequence, as one table
stop_rules      when an output is complete, by tokens alone
waiting_queue   sequences without a seat, in order
block_pool      KV blocks: free, cached, running, reserved, receiving or quarantined
prefix_cache    which block holds the KV of which prefix
prefix_index    block hashes of sequences, looked up and published
host_pool       ids of host memory blocks for preempted sequences
swapping        copies of preempted sequences' blocks to host memory and back
cache_copy      a copy between a device and host memory, as the runner sees it
invariants      what always holds between sequences, seats and blocks
grammar_statistics  what following grammars took, as one immutable value
statistics      what a scheduler has done, as one immutable value
policies/       reservation and victims, by name
speculation/    drafting without a model, and how many drafts pay
"""
