"""A soak: a real cluster under mixed load, with one random fault every 20 s: `make test-soak`.

__main__       the run, and the last look at what is held
schedule       draws the faults
injection      performs them
cluster        the cluster, behind networks that can be cut
questions      what is asked
conversations  what is asked where most of a prompt is cached
clients        ask, and compare every answer
tiers          what moved between tiers of prefixes
files          whether files of prefixes are what indexes name
report         counts

`python -m tests.soak --help` says more.
"""
