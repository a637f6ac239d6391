"""`pdserve profile`: what this machine does with a model.

profile_command  from settings to a file
step_times       decodes, chunks and verified drafts by their sizes
transfer_times   KV between two pools by size
own_cluster      a cluster on this machine
served_times     tokens of a cluster as clients see them

Decisions:

What serves is what is measured: the runner that a node loads, and the connectors that nodes have.
The file has what was measured and no model of it (`common/measured_profile.py`), so a planner can
fit what it needs, and a later one something else.
"""
