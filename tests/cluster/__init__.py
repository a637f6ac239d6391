"""Clusters of real processes for tests: real roles, a real Redis, real sockets.

waiting      wait for a condition, with a deadline
tiny_model   a random checkpoint that loads in no time
processes    one `pdserve serve` process
memory       what a process takes of the machine's memory
other_user   what another user of the machine tries, as a process of that user
attacks_on_files  its tries with files and processes
books        what nodes and the store hold, and the check that it is nothing
cluster      processes that form one cluster
topologies   clusters that several test files use
schemas      JSON schemas, and the check that an answer follows one
api          an HTTP client that knows the API's answers
"""
