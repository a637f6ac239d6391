"""Replays: what processes decided, decided again from their recordings.

replay         a recording of whatever process, and what comes of it
placing_calls  those of a router: the calls of its membership and of its chooser
step_calls     those of a node: the calls of its flow
made_up_tokens what stands in for the tokens, which are not recorded
compared       how far a replay is, and what differs

Decisions:

Recorded inputs are given to new machines one by one, at the times that were recorded, and nothing
else happens: no network and no step is modelled, so no modelled time can differ from the real one.
The first decision that differs is therefore a bug, or a change of the code since the recording.
What follows it says nothing, since the machines have another state than the recorded ones had.
"""
