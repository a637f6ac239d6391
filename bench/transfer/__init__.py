"""How fast KV blocks get from one process into another on this machine; see `__main__`."""
