"""The shared store of live nodes, their load, and the placement of each request."""
