"""How many nodes of each role the load wants, and which node changes its role next. Pure.

measure   what nodes report, made into rates over a few seconds
demand    how many nodes of each role the targets want, and why
moves     the next node to change its role, if any: hysteresis, cool-down, the survivors' load
scaling   the three together; what is decided, as one value

Decisions:

Demand is what arrives, not what leaves. What a role computes a second says how much it is able to
do; an overloaded role computes the same whatever is asked of it. So what arrives is what was
computed plus what the queues grew by. A prompt that waits for a seat on a decode node counts for
both roles: the prefill nodes have it before them although none of them knows it yet.

All numbers are the nodes' own, from the placement store: every router sees the same ones, through
whichever the requests came, and an outside autoscaler sees them in the metrics of any router.

A node is worth what it was seen to do. No speed is configured: tokens a second of prefill are
learned from the steps that computed prompts, and what a decode node holds from its blocks, its
seats and the time of its steps. A role that was never seen to work wants what it has.

A node is taken from a role only where those that stay are not worse off than the role that gets it
(`Plan` in `moves`): looking at the one that is short alone would give the node back at once.
"""
