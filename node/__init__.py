"""What every engine node is around its scheduler.

life/     how it starts, lives and ends
control/  routers call it here
watch/    what it shows
flow/     what it decides: messages in, effects out

Decisions:

`node/` is a package of its own. It holds what prefill and decode nodes share outside the engine;
without it they would import each other or repeat code.
"""
