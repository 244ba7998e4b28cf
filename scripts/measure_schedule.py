"""How long pipeline schedules take on real stages, beside their simulation.

Two processes, each on a core of its own, are two stages. A step with `FEW` and one with `MANY` micro-batches are timed,
and their ratio, which knows no unit, is compared with the simulated one: without a bubble it would be `MANY` / `FEW`.
Prints one JSON line: for each schedule measured, simulated, and how far they are apart.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxtrain import distributed, runtime
from jaxtrain.config import Config, load

CONFIG = """
run_dir: {folder}/run
steps: 1000
compile_cache: null
microbatch: 1
model: {{vocab: 512, layers: 8, embed: 256, heads: 8, mlp: 1024}}
data: {{sequence: 512}}
mesh: {{pipeline: 2}}
"""
FEW, MANY, STAGES = 2, 8, 2
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
"""Kind to chunks."""
WARM, STEPS = 2, 7


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage is not None:
        result = measure(arguments.stage, arguments.port)
        if arguments.stage == 0:
            print(json.dumps(result))
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    itself = [sys.executable, str(Path(__file__).resolve()), "--port", str(port), "--stage"]
    stages = [subprocess.Popen([*itself, str(stage)]) for stage in range(STAGES)]
    codes = [stage.wait() for stage in stages]
    if any(codes):
        sys.exit("error: a stage failed; its message stands above")


def measure(stage: int, port: int) -> dict[str, dict[str, float]]:
    """All schedules, in one of the two processes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < STAGES:
        sys.exit(f"error: {STAGES} stages need {STAGES} cores, and this process may use {len(cores)}")
    os.sched_setaffinity(0, {cores[stage]})
    place = [f"distributed.coordinator=localhost:{port}", f"distributed.processes={STAGES}"]
    place += [f"distributed.process_id={stage}", "cpu_devices=1"]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.yml")
        path.write_text(CONFIG.format(folder=folder))
        first = load(path, ["global_batch=2", *place])
        runtime.configure(first)
        distributed.initialize(first.distributed)
        for kind, chunks in SCHEDULES.items():
            seconds, simulated = {}, {}
            for count in (FEW, MANY):
                keys = [f"global_batch={count}", f"pipeline.schedule={kind}", f"pipeline.chunks={chunks}"]
                seconds[count], simulated[count] = timed(load(path, [*keys, *place]))
            measured, expected = seconds[MANY] / seconds[FEW], simulated[MANY] / simulated[FEW]
            results[kind] = {"measured": round(measured, 3), "simulated": round(expected, 3)}
            results[kind] |= {"apart": round(measured / expected - 1, 3), "step_seconds": round(seconds[MANY], 3)}
    return results


def timed(config: Config) -> tuple[float, float]:
    """The median time of a step, in seconds, and the simulated one, in another unit."""
    import jax
    import numpy as np

    from jaxtrain.pipeline.schedule import make_schedule
    from jaxtrain.pipeline.simulation import simulate
    from jaxtrain.placement import Placement
    from jaxtrain.program import build

    program = build(config, jax.devices())
    place, random = Placement(program.batch), np.random.default_rng(0)
    step = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).compile()
    state, inputs = program.init(program.initial_key()), program.inputs(steps=1000)
    rows, length = program.batch["tokens"].shape
    tokens = random.integers(0, config.model.vocab, (rows, length + 1), dtype=np.int32)
    ones, positions = np.ones((rows, length), np.int32), np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones, "positions": positions}
    placed = place({**batch, "weights": ones.astype(np.float32)})
    seconds = []
    for _ in range(WARM + STEPS):
        distributed.barrier("step", timeout=600)
        started = time.perf_counter()
        state, metrics = step(state, placed, inputs)
        metrics["loss"].block_until_ready()
        seconds.append(time.perf_counter() - started)
    schedule = make_schedule(config.pipeline.schedule, STAGES, rows, config.pipeline.chunks)
    loads = program.stages.loads
    total = simulate(schedule, [load / 3 for load in loads], [load * 2 / 3 for load in loads]).total
    return statistics.median(seconds[WARM:]), total


if __name__ == "__main__":
    main()
