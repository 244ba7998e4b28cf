"""What a run tells about itself: metrics, events, progress, logs. Importable without jax."""
