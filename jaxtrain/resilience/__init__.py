"""What a run survives, and how faults are seen and named."""
