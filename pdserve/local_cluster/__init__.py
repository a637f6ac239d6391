"""`pdserve up`: a whole cluster on one machine.

local_cluster   starts, watches and ends every process
cluster_plan    which processes there are, and the configuration of each
restarts        when a node that died is started again
messages        what is said while nodes start, when all serve, and when a process has ended
child_process   a child process with a log, stopped by its pid
exec_child      becomes a command that is killed when its parent dies
embedded_redis  a Redis server for this cluster
free_ports      free ports of this machine
local_keys      the keys of one run
private_files   files of mode 600
run_folder      the folder of one run: logs and private files
sample_answer   one streamed chat request, to show that the cluster works
signals         signals as something to wait for

Decisions:

`pdserve up` makes keys for each run. Every user of a machine can connect to its loopback ports.
Unix sockets in a private folder would close them too, but nodes would have a second kind of
address, which Prometheus cannot read. Certificates, CURVE and tokens exist, are the same code as
between machines, and take 0.1 s at the start. Redis has a socket, because its clients know both.
The router's port stays open without a key, because that is what a cluster to try out is for;
draining alone requires the administrator's (`open_api`).
"""
