"""Whether a node lives, and gets what it is sent.

node_liveness  silence and echoes at one pace: what is asked, and what is found
silence        when a node has been silent for too long
pace           how often both tell each other, by the number of nodes and what they do
echoes         whether what is sent to a node arrives there
pings          whether the process of a silent node still runs
"""
