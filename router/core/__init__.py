"""The router's decisions without I/O: events and `now_s` in, effects out.

request_flow   the machine of one choice: which node is asked for what, and its one outcome
attempts       which attempts of it go on: one, or two while a node is suspected
attempt        one attempt: its nodes, what is open there, its tokens
candidates     which nodes it may still ask, and whether it waits where there is none
token_ledger   the tokens of an attempt's nodes in one order, each index once
effects        what a flow asks its shell to do
ttft_stages    where the time to the first token went
membership     which nodes are alive, from the store and from the nodes' streams
held_load      what a node holds now, from its last report and what was sent to it
placement      which nodes take a request: filter, score, pick
pair_health    which pairs of nodes fail to hand off, and when each is tried again
prefix_map     which prefixes each node's cache is believed to hold
policies/      placement policies by name
generation     the seam between the HTTP edge (text) and dispatch (nodes)
cluster_view   the seam between the HTTP edge and the cluster behind it
"""
