"""Prefixes that nodes take out of each other's caches.

prefix_pulls  what a node takes from another one, and which prompts wait for it
pull_cost     whether a pull pays, and from which nodes none comes
prefix_sends  what a node sends others
hand_over     what a node that drains offers to those that stay

Decisions:

What a source has to do is in the cost of a pull: a router counts the tokens of prompts on it, and
how much of a step of so many is waited for is learned, as the other constants are, and forgiven by
refusals as they are. Of agents on nodes whose pools hold a quarter of what is asked
(`bench.agents.simulated` without host memory, with a quarter of its network, 11 GB/s a port) that
costs nothing where it says little: on 8 prefill and 8 decode nodes nearly all pulls come out of
decode nodes, which answer between short steps; 423 pulls and 190.2 ms to the first token in the
mean, and 428 and 190.2 without it. On 16 mixed nodes, where every source computes prompts, 80 pulls
found 0.741 of the prompts, and it was 156.0 ms; without it 74, 0.733 and 160.3. With another seed
these were 58, 0.757 and 141.9, and 54, 0.756 and 142.4. A source took 0.03 of a step to answer: of
the prompts that a router counts most is cached. That half a step is waited for was wrong: 37 pulls,
0.714 and 167.3 ms. What nodes report instead is old: 51, 0.727 and 163.2.

A refusal makes the next pull likelier by 5 %, though where pulls are as slow as computing many are
then slower. These are worth trying: what is pulled is not computed, and others wait less. With a
tenth of the network, and without the sources' load, 139 pulls took 50 ms longer than computing in
the mean, 6.9 s together, and 0.655 of the prompts were found; the mean time to the first token was
214 ms. Where refusals forgive nothing, 23 pulls were slower, 0.607 were found, and it was 222 ms.
Forgiven by time, as 1 % of the time since the last pull may be lost, 210 were slower, and 0.663 and
214 ms were the same. With the sources' load 150 are slower, by 8.2 s, and it is 0.657 and 217 ms
(with another seed 205.3 for 203.0); where refusals because of that load alone forgive nothing,
0.643 and 225 ms.
"""
