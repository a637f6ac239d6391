"""What every engine node is around its scheduler.

life/     how it starts, lives and ends
control/  routers call it here
watch/    what it shows
flow/     what it decides: messages in, effects out
"""
