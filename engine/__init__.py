"""What prefill, decode and mixed nodes share.

core/           scheduling: pure, no clock, no thread, no framework
runner/         execution: the only package that imports Paddle
prefix_disk/    prefixes in files: folders, formats, threads
step_loop       one thread: drain the inbox, plan, run, apply, emit
execution       where steps are executed: on the step thread, or on a thread of their own
preemption_log  what steps preempted, in the log at most every few seconds
"""
