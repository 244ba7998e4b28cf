"""Layers spread over stages: schedules as tables, what they need and how long they take. Never imports jax."""
