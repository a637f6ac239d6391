"""The sending machine of a handoff, pure: a prefill node's side.

machine           the machine; links: all links, with their deadlines
link              one decode node; channels and further_channels: its connections
pump              which frames may be sent; shared_window: what they may send together
transfer          one handoff; turns: which one sends next
joining           how many chunks become one frame
unreachable       decode nodes that did not answer; transfer_errors: how transfers end badly
effects           what the machine asks its connector to do
link_rates        which transfers are too slow
"""
