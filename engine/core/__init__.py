"""Scheduling without I/O: sequences, blocks, plans. No clock, no thread, no framework.

scheduler         the one writer of sequences and blocks: events in, a planned step out
invariants        what always holds between sequences, seats and blocks
holdings          what sequences hold, from the queue to the end: seats and blocks
swapping          copies of preempted sequences' blocks to host memory and back
planning/         what one step runs
step/             a planned step on its way to the runner and back
statistics        what a scheduler has done, as one immutable value
planner_contract  what the planner reads and the decision it returns
sequences/        sequences from the queue to the end
policies/         reservation and victims, by name
speculation/      drafting without a model, and how many drafts pay
blocks/           blocks of KV, by number
runner_contract   a step as the runner sees it
grammar_statistics  what following grammars took, as one immutable value
"""
