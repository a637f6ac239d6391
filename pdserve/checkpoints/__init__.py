"""From what `--model` names to a Hugging Face folder on this machine. No Paddle here."""
