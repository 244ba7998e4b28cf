"""Model families as tasks: Flax modules in logical names, with no mesh in sight."""
