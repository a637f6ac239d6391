"""Grammars are tried in processes of their own, with limits of CPU, memory and stack.

trials    tries grammars: the side of a router or a node
messages  what travels between the two
server    forks a process for each trial
queue     in which order, fair between clients
trial     one trial, in its process

Decisions:

A grammar is tried before its request goes on. No count tells what a grammar takes to compile: 26
patterns that one text must match take minutes, and a chain of rules takes stack until the process
ends. So what can be counted is bounded first, and the rest is left to the kernel: a child of the
router (`grammars/trying/server.py`) forks for each grammar that the router has not seen, with
limits of CPU, memory and stack. A fork takes 6 ms, and it leaves nothing: neither the child nor the
router keeps a compiled grammar. Trials that last longer than 0.1 s make room for those of others,
and no client has all slots (`grammars/trying/queue.py`, without I/O). A problem is a 400 with the
place in the schema, or with the limit.
"""
