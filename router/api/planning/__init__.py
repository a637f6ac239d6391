"""From a body to prompts, sampling parameters and the form of the answer.

body_planner      where a body is planned: on the event loop, a thread, or by another process
process           the router's side of that process: its queue, its starts and ends
child             what runs in that process
messages          what travels between the two: bodies, plans, errors
planner           from what a body asks for to a plan
request_plan      the plan: prompts, how their choices draw, how they are shown
prompts           prompts as token ids
output            how much: choices, tokens, log probabilities, within their bounds
sampling          sampling parameters for one model
answer_syntax     what an answer may hold (thinking, calls), and its grammar
token_dead_ends   rules about tokens that leave none to draw
"""
