"""`python -m tests.restore_parameters RUN [key=value …]`: restores the parameters of a run, and says how many."""

import sys

import jax

from jaxtrain.checkpoint import restore_part
from jaxtrain.program import build
from jaxtrain.saved_run import config_of, find_checkpoint

saved = find_checkpoint(sys.argv[1])
program = build(config_of(saved, sys.argv[2:]), jax.devices())
params = restore_part(saved, program.state["params"])
count = sum(leaf.size for leaf in jax.tree.leaves(params))
sys.stdout.write(f"{count} parameters of step {saved.meta.step} on {len(jax.devices())} devices\n")
