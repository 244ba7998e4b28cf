"""How long pipeline schedules take on real stages, beside their simulation.

Two processes, each on a core of its own, are two stages. The simulation knows neither how long its unit is nor what a
step costs once, whatever its schedule and micro-batches (the update, fetching the weights). These two numbers, the same
for all schedules, are fitted to the times of all steps; what is left is how far measured and simulated are apart.
Prints one JSON line: for each schedule the seconds of a step by its micro-batches, simulated ones, and the largest
distance.
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
remat: full
model: {{vocab: 512, layers: 8, embed: 256, heads: 8, mlp: 1024}}
data: {{sequence: 512}}
mesh: {{pipeline: 2}}
"""
COUNTS, STAGES = (2, 4, 8), 2
"""How many micro-batches a step has."""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
"""Kind to chunks."""
WARM, STEPS = 2, 7
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
"""Else a schedule that needs more memory pays the kernel for it again in each step."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage is not None:
        result = measure(arguments.stage, arguments.port)
        if arguments.stage == 0:
            print(json.dumps(compared(result)))
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    itself = [sys.executable, str(Path(__file__).resolve()), "--port", str(port), "--stage"]
    environment = {**os.environ, **KEEP_MEMORY}
    stages = [subprocess.Popen([*itself, str(stage)], env=environment) for stage in range(STAGES)]
    codes = [stage.wait() for stage in stages]
    if any(codes):
        sys.exit("error: a stage failed; its message stands above")


Times = dict[tuple[str, int], tuple[float, float]]
"""By schedule and micro-batches: seconds of a step, and simulated, in another unit."""


def measure(stage: int, port: int) -> Times:
    """All schedules, in one of the two processes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < STAGES:
        sys.exit(f"error: {STAGES} stages need {STAGES} cores, and this process may use {len(cores)}")
    os.sched_setaffinity(0, {cores[stage]})
    place = [f"distributed.coordinator=localhost:{port}", f"distributed.processes={STAGES}"]
    place += [f"distributed.process_id={stage}", "cpu_devices=1"]
    results: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.yml")
        path.write_text(CONFIG.format(folder=folder))
        first = load(path, ["global_batch=2", *place])
        runtime.configure(first)
        distributed.initialize(first.distributed)
        for kind, chunks in SCHEDULES.items():
            for count in COUNTS:
                keys = [f"global_batch={count}", f"pipeline.schedule={kind}", f"pipeline.chunks={chunks}"]
                results[kind, count] = timed(load(path, [*keys, *place]))
    return results


def compared(times: Times) -> dict[str, dict[str, object]]:
    """Measured beside simulated seconds, once the two numbers that the simulation doesn't know are fitted."""
    import numpy as np

    seconds, simulated = np.array(list(times.values())).T
    relative = np.stack([np.ones_like(simulated), simulated], axis=1) / seconds[:, None]
    once, unit = np.linalg.lstsq(relative, np.ones_like(seconds), rcond=None)[0]
    expected = dict(zip(times, once + unit * simulated, strict=True))
    result: dict[str, dict[str, object]] = {}
    for kind in SCHEDULES:
        own = {count: (times[kind, count][0], expected[kind, count]) for count in COUNTS}
        result[kind] = {
            "seconds": {count: round(measured, 3) for count, (measured, _) in own.items()},
            "simulated": {count: round(at, 3) for count, (_, at) in own.items()},
            "apart": round(max((measured / at - 1 for measured, at in own.values()), key=abs), 3),
        }
    return result | {"once": {"seconds": round(float(once), 3)}}


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
    total = simulate(schedule, [load / 4 for load in loads], [load * 3 / 4 for load in loads]).total
    return statistics.median(seconds[WARM:]), total


if __name__ == "__main__":
    main()
