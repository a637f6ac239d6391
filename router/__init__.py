"""The HTTP edge and the choice of nodes. Holds no Paddle and no state beyond its requests."""
