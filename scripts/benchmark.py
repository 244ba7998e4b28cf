"""Tokens per second of a small language model through the real train step, on this machine's processor.

    scripts/benchmark [--rounds N] [--steps N] [--beside COMMAND]

The work: a decoder of 8,390,912 parameters (4 layers, width 256, 8 heads, gated MLP 1,024, vocabulary 8,192), float32,
8 rows of 256 tokens, AdamW with clipping; each step's batch is new, placed by the trainer, and its loss is read back.
It is measured on the devices that a run gets by default, and over eight virtual devices on fsdp 4 × tensor 2 and on
pipeline 2 × fsdp 2 × tensor 2.

`--beside` names a program that does the same work and prints one JSON line with `tokens_per_second` or `tok_s`. It runs
in turn with ours, so that a machine whose speed drifts slows both; the shares are medians of the rounds' ratios.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxtrain import runtime
from jaxtrain.config import Config, load

CONFIG = """
run_dir: {folder}/run
steps: 1000
global_batch: 8
compile_cache: null
model: {{vocab: 8192, layers: 4, embed: 256, heads: 8, mlp: 1024}}
data: {{sequence: 256}}
optimizer: {{learning_rate: 3e-4, b2: 0.95, weight_decay: 0.1, clip: 1.0}}
"""
LAYOUTS = {
    "default": [],
    "fsdp4_tensor2": ["cpu_devices=8", "mesh.fsdp=4", "mesh.tensor=2"],
    "pipeline2_fsdp2_tensor2": [
        "cpu_devices=8", "mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "microbatch=1", "remat=dots",
    ],
}  # fmt: skip
WARM = 3


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that all are measured in turn (3)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps a round (15)")
    parser.add_argument("--beside", metavar="COMMAND", help="a program to measure in turn with ours")
    parser.add_argument("--only", choices=LAYOUTS, help="measure this layout once, in this process")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(LAYOUTS[arguments.only], arguments.steps)))
        return
    itself = [sys.executable, str(Path(__file__).resolve()), "--steps", str(arguments.steps)]
    # The other goes first: if it is not what it should be, that shows at once.
    commands = {"beside": shlex.split(arguments.beside)} if arguments.beside else {}
    commands |= {name: [*itself, "--only", name] for name in LAYOUTS}
    rounds = []
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        rounds.append({name: output_of(command) for name, command in commands.items()})
    print(json.dumps(summary(rounds)))


def output_of(command: list[str]) -> dict[str, Any]:
    """The last line that a program prints, which must be JSON."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        sys.exit(f"error: {shlex.join(command)} (exit code {done.returncode}) printed no line of JSON")
    return result


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds, and the shares of what ran beside."""

    def speeds(name: str) -> list[float]:
        return [each[name].get("tokens_per_second", each[name].get("tok_s")) for each in rounds]

    first = rounds[0]["default"]
    result = {"tokens_per_second": round(statistics.median(speeds("default"))), "devices": first["devices"]}
    others = [name for name in LAYOUTS if name != "default"]
    for name in others:
        result[f"{name}_tokens_per_second"] = round(statistics.median(speeds(name)))
    if "beside" in rounds[0]:
        result["beside_tokens_per_second"] = round(statistics.median(speeds("beside")))
        for name, key in (("default", "share"), *((name, f"{name}_share") for name in others)):
            shares = [ours / theirs for ours, theirs in zip(speeds(name), speeds("beside"), strict=True)]
            result[key] = round(statistics.median(shares), 3)
    return {**result, "parameters": first["parameters"], "rounds": len(rounds)}


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """The work in this process: the median over steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "benchmark.yml")
        path.write_text(CONFIG.format(folder=folder))
        config = load(path, overrides)
    runtime.configure(config)
    return timed(config, steps)


def timed(config: Config, steps: int) -> dict[str, Any]:
    """Runs the train step of `config` on random tokens."""
    import jax
    import numpy as np

    from jaxtrain.models.parameters import count_parameters
    from jaxtrain.placement import Placement
    from jaxtrain.program import build

    program = build(config, jax.devices())
    place, random = Placement(program.batch), np.random.default_rng(0)
    step = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).compile()
    state, inputs = program.init(program.initial_key()), program.inputs(steps=1000)
    rows, length = config.global_batch, program.batch["tokens"].shape[1]
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    ones = np.ones((rows, length), np.int32)
    seconds = []
    for _ in range(WARM + steps):
        tokens = random.integers(0, config.model.vocab, (rows, length + 1), dtype=np.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones, "positions": positions}
        started = time.perf_counter()
        state, metrics = step(state, place({**batch, "weights": ones.astype(np.float32)}), inputs)
        metrics["loss"].item()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[WARM:])
    return {
        "tokens_per_second": round(rows * length / median, 1),
        "step_seconds": round(median, 4),
        "devices": len(jax.devices()),
        "parameters": count_parameters(program.infos),
    }


if __name__ == "__main__":
    main()
