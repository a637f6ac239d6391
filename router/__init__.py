"""The HTTP edge and the choice of nodes. Holds no Paddle, no tensors, no state beyond its requests."""
