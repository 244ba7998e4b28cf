"""Layers spread over stages: schedules as tables, what they need, how long they take, and what runs them."""
