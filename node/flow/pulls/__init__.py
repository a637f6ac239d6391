"""Prefixes that nodes take out of each other's caches.

prefix_pulls  what a node takes from another one, and which prompts wait for it
pull_cost     whether a pull pays, and from which nodes none comes
prefix_sends  what a node sends others
hand_over     what a node that drains offers to those that stay

Decisions:

What a source computes and sends beside a pull is in its cost as far as the constants learn it, and
not by itself. Most pulls come out of decode nodes, which answer between short steps. Of agents on 8
prefill and 8 decode nodes whose pools hold a quarter of what is asked (`bench.agents.simulated`,
without host memory, 45 GB/s a port) 510 pulls took 27 ms in the mean, as expected, and off by 4 ms;
one took longer than computing. With a quarter of that network 7 of 428 did, by 0.4 s together, and
with twice as many sessions in a second 11 of 364, by 0.8 s: at most 0.3 % of all times to the first
token. These were pulls out of prefill nodes in a long step, and beside one other flow. No node had
two pulls on their way to it. Routers would have to tell receivers what a source has queued.

A refusal makes the next pull likelier by 5 %, though where pulls are as slow as computing many are
then slower. These are worth trying: what is pulled is not computed, and others wait less. With a
tenth of that network 139 pulls took 50 ms longer than computing in the mean, 6.9 s together, and
0.655 of the prompts were found; the mean time to the first token was 214 ms. Where refusals forgive
nothing, 23 pulls were slower, 0.607 were found, and it was 222 ms. Forgiven by time, as 1 % of the
time since the last pull may be lost, 210 were slower, and 0.663 and 214 ms were the same.
"""
