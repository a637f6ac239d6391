"""From a body to prompts, sampling parameters and the form of the answer.

body_planner      where a body is planned: on the event loop in turns, a thread, or a process
process           the router's side of that process: its queue, its starts and ends
child             what runs in that process
messages          what travels between the two: bodies, plans, errors
planner           from a body to a plan: prompts as token ids, how choices draw, how they are shown
choices           how many, how much each gets, and how it draws with one model
answer_syntax     what an answer may hold (thinking, calls), and its grammar
token_dead_ends   rules about tokens that leave none to draw

Decisions:

Large bodies are planned by a process of their own. Parsing holds the interpreter lock, also on a
thread: ten megabytes of numbers stop all streams of the router for a third of a second, and bodies
on several threads hold the lock in turn. The router therefore starts one child
(`router/api/planning/process.py`), which has its own tokenizer and plans one body after the other.
Its plans return as JSON and packed token ids, one prompt per message, so that reading them does not
stop the loop either; they are not unpickled, because the child reads the input of untrusted
clients. Bodies of medium size stay on one thread: they are too common to wait behind a large one,
and too small to be noticed. The child is started for the first large body. It is ready after a
third of a second, which is short compared with computing so long a prompt. A router that gets no
large body needs no memory for the child and does not start more slowly. It ends with its standard
input, and the kernel kills it when the router dies, also while it is stopped. A body whose child
died twice is refused; planning it in the router could end the router. Children are started by
`vfork`: at a fork the handlers of gRPC run in the child, and end it.
"""
