"""From a body to prompts, sampling parameters and the form of the answer.

body_planner      where a body is planned: on the event loop, a thread, or by another process
process           the router's side of that process: its queue, its starts and ends
child             what runs in that process
messages          what travels between the two: bodies, plans, errors
request_plan      from a parsed body to prompts and sampling parameters
prompts           prompts as token ids
answer_syntax     what an answer may hold (thinking, calls), and its grammar
token_dead_ends   rules about tokens that leave none to draw
seeds             the seeds of a request's choices
translations      requests of other APIs as chats
"""
