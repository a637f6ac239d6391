"""`pdserve up`: a whole cluster on one machine.

local_cluster   starts, watches and ends every process
cluster_plan    which processes there are, and the configuration of each
restarts        when a node that died is started again
start_progress  what nodes that start are doing, out of their logs
first_lines     where everything is, once the cluster serves
endings         what is said when a process has ended
child_process   a child process with a log, stopped by its pid
exec_child      becomes a command that is killed when its parent dies
embedded_redis  a Redis server for this cluster
free_ports      free ports of this machine
local_keys      the keys of one run
private_files   files of mode 600
run_folder      the folder of one run: logs and private files
sample_answer   one streamed chat request, to show that the cluster works
signals         signals as something to wait for
"""
