"""Scheduling policies: frozen values and pure functions, chosen by name."""
