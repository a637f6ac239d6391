"""Prefixes that nodes take out of each other's caches.

prefix_pulls  what a node takes from another one, and which prompts wait for it
pull_cost     whether a pull pays, and from which nodes none comes
prefix_sends  what a node sends others
hand_over     what a node that drains offers to those that stay
"""
