"""What every HTTP port of a process shares: a listening socket, a server, bounded connections.

server                a listening socket and a server for it
bounded_connections   the limits of its connections
half_closed           clients that send no more: those that read on, and those that are gone
offered_upgrades      requests that offer another protocol are answered as they are
plain_paths           paths that can be read in one way only; all others are refused
certificate           the certificate of an HTTPS port, read again when it changes
process_metrics       the metrics that every process has
"""
