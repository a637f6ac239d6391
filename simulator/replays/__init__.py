"""Replays: decisions of processes, made again from their recordings.

replay         a recording of a router or a node, and the result of its replay
placing_calls  the calls of a router: of its membership and of its chooser
step_calls     the calls of a node: of its flow
made_up_tokens tokens in place of those of the requests, which are not recorded
compared       how far a replay is, and what differs

Decisions:

Recorded inputs are given to new machines one by one, at the times that were recorded. No network
and no step is modelled, so no modelled time can differ from the real one. The first decision that
differs is therefore a bug, or a change of the code since the recording. Later ones are not
compared, since the machines then have another state than the recorded ones had.
"""
