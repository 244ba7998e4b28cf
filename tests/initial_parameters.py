"""`python -m tests.initial_parameters FAMILY,… CONFIG [key=value …]`: what their parameters begin as, by checksum."""

import json
import sys

import jax

from jaxtrain.checkpoint.checksum import as_text, content_sums
from jaxtrain.command import join
from jaxtrain.config import load
from jaxtrain.program import build
from tests.runs import FAMILIES

families, path, *overrides = sys.argv[1:]
devices = join(load(path, overrides))
for family in families.split(","):
    program = build(load(path, [*FAMILIES[family], *overrides]), devices)
    sums = jax.jit(content_sums)(program.init(program.initial_key())["params"])
    sys.stdout.write(json.dumps({"family": family, "checksums": as_text(jax.device_get(sums))}) + "\n")
