"""What prefill, decode and mixed nodes share: scheduling (pure) and execution (Paddle)."""
