"""Clients of other projects, unchanged, each in an environment of its own: `make test-clients`.

__main__       the environments, and the runs one after the other
real_cluster   a cluster of processes on the demo model
scripted_edge  the API over a model that answers what a request spells
with_…         what is done with one client, run by that client's interpreter
"""
