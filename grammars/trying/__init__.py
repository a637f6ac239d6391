"""Grammars are tried in processes of their own, with limits of CPU, memory and stack.

trials    tries grammars: the side of a router or a node
messages  what travels between the two
server    forks a process for each trial
queue     in which order, fair between clients
trial     one trial, in its process
"""
