"""What every HTTP port of a process shares: a listening socket, a server, bounded connections."""
