"""Sequences from the queue to the end.

sequence       one stream of tokens on one node
status         the life of a sequence, as one table
stop_rules     when an output is complete, by tokens alone
waiting_queue  sequences without a seat, in order
running        the running sequences, by arrival
seats          the seated sequences as arrays, changed in place
prefix_index   block hashes of sequences, looked up and published
"""
