"""Starting the processes of a run, and starting them again: no module here imports jax."""
