"""What every HTTP port of a process shares: a listening socket, a server, bounded connections.

server                a listening socket and a server for it
bounded_connections   the limits of its connections
process_metrics       the metrics that every process has
"""
