"""The machines of a handoff, pure: see the map in `kv_transfer`."""
