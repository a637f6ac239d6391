"""`pdserve simulate`: histories with faults on a simulated cluster, from the command line.

simulate_command  from flags to histories, and a wrong one to a file
on_all_cores      histories in several processes
history_runner    one of these processes
replay_command    the decisions of a recording, made again
"""
