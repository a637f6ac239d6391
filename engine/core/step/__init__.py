"""A planned step on its way to the runner and back.

runner          what executes them
step_batch      the sequences of one step, as arrays and one by one
step_in_flight  a step that runs: its sequences and copies, and what is sent of it
step_results    what a step drew, written into its sequences; the fast path of plain decodes
prompt_rows     rows of a step that say how likely a prompt is
"""
