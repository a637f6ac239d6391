"""The shared store of live nodes, their load, and the placement of each request.

Decisions:

`placement/` is a package of its own. It holds the contract of the store that routers and nodes both
write to; nodes must not import the router.

A node's facts are named once. `NodeRecord` and `NodeLoad` in `common/nodes.py` declare every field
with its type and limits. `placement/records.py` encodes and decodes them by these fields, for the
placement store, `/v1/cluster`, the live page and `pdserve status`. A new field requires a default,
because nodes of earlier versions do not send it, and no change of the codec.

Placement records are renewed while their attempt runs, for 12 s at a time. The records of a dead
router expire soon, and a long request does not require a long expiry. No process reads them: they
say to operators and their tools where requests run, and an answer never depends on one.

Epochs survive an emptied Redis. An epoch is the larger of the last epoch plus 1 and the server's
clock in microseconds. A node that restarts after `FLUSHALL` is therefore still newer than its
previous incarnation.
"""
