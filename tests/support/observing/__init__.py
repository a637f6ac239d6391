"""What a process shows: spans, readings of the live page, the sockets that it listens on.

control_groups    control groups, as the kernel describes them to a process
listeners         what a process listens on, as the kernel knows it
live_readings     readings for the live page
otlp_collector    a collector of OTLP traces
process_tasks     a process's threads and children, as the kernel names them
recorded_tracing  spans kept in memory
samples           the samples of a registry by name
"""
