"""`pdserve plan`: how many nodes of which role, found by trying them on a virtual clock.

plan_command  from flags to an answer
wanted        the flags, checked
lengths       `--lengths`: numbers and distributions
access_log    the lines of a router's log as a trace
workload      the requests of each trial: windows of a trace, or drawn ones
trial         one simulation and what it says of the targets
search        which shapes are tried, and which is the answer: pure
advice        settings that are worth changing
answer        everything that was found
shown         the answer in plain words, as JSON; page: as a page with plots
page          plots of a page that requires no network

Decisions:

A trial runs the code that serves (`simulator/`). A search tries few shapes: the number of nodes is
doubled until the targets are met and then halved in, the split is climbed to from the one before,
and a trial ends as soon as too many requests have missed their targets for it to succeed.

What is promised is a share of requests within both targets, failed ones included, and not a mean.
Each seed is another window of the trace or another drawing, and their spread is the interval.
"""
