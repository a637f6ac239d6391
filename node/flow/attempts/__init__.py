"""The attempts on a node, from their queue to what routers hear of them.

attempt_table    who asked for each, until when
attempt_queue    on their way to the scheduler, and their ends there
shedding         when a queued request would end, and whether that is too late
attempt_outputs  what a node says in a router's stream about an attempt
"""
