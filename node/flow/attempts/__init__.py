"""The attempts on a node, from their queue to what routers hear of them.

attempt_table  who asked for each, until when, and what these are told in their streams
attempt_queue  on their way to the scheduler, and their ends there
shedding       when a queued request would end, and whether that is too late
standstills    which turns are no measure of that, because the node stood still
"""
