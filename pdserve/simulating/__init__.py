"""`pdserve simulate`: histories with faults on a simulated cluster, from the command line.

simulate_command  from flags to histories, and a wrong one to a file
replay_command    the decisions of a recording, made again
"""
