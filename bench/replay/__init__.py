"""Replays of request traces through the scheduler, on a virtual clock."""
