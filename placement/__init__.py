"""Who is alive, how busy they are, and where each request is placed: the shared store."""
