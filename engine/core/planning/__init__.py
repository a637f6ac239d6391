"""What one step runs: a pure function of sequences, queue, blocks and policy.

planner         the function: each sequence is given tokens, and waiting ones are admitted
step_budget     tokens, blocks and seats that are left in one step
decode_plan     the decoding sequences of a step, and which are preempted
chunk_plan      the prefill chunks of a step: which prompt gets how many tokens
chunk_work      the work of a chunk: tokens, and pairs that attend
admission_plan  which waiting sequences are admitted
plan_ahead      a plan made while the step before runs, and whether it can be taken
forecast        what the state will be when that step has ended
"""
