"""Processes of the previous release beside those of this one, under load: `make test-upgrade`.

__main__  the run
release   takes the previous release's sources out of the repository's history
rollout   what is replaced in which order
watch     looks at routers and leases meanwhile
handoffs  which nodes were paired
report    judges and counts

`python -m tests.upgrade --help` says more.
"""
