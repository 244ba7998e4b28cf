"""What the training loop adds to each step, on a model so small that little else is left.

The same compiled step is called bare (batches on the device already, nothing read back) and by the loop (data, metrics,
progress, files). Prints one JSON line with the medians of several rounds, in milliseconds a step.
"""

import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxtrain import loop
from jaxtrain.config import Config, load
from jaxtrain.data import ROW_IDS, host_batches, write_dataset
from jaxtrain.data.prepare.tokenizer import train_tokenizer
from jaxtrain.placement import Placement
from jaxtrain.program import build
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.training_data import open_data

STEPS, ROUNDS, WARM = 300, 5, 20
CONFIG = """
run_dir: {folder}/run
steps: {steps}
global_batch: 8
log_every: 10
model: {{vocab: 300, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}}
data: {{dir: {folder}/data, sequence: 32}}
checkpoint: {{every: 0}}
"""


def main() -> None:
    """Measures and prints."""
    rounds = [measure() for _ in range(ROUNDS)]
    bare, looped = (statistics.median(column) for column in zip(*rounds, strict=True))
    added = statistics.median(looped - bare for bare, looped in rounds)
    print(json.dumps({"bare_step_ms": round(bare, 3), "loop_step_ms": round(looped, 3), "added_ms": round(added, 3)}))


def measure() -> tuple[float, float]:
    """(bare, looped) milliseconds a step, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random = np.random.default_rng(0)
        documents = [random.integers(0, 256, 200).tolist() for _ in range(400)]
        tokenizer = train_tokenizer(["some text"], 300).tokenizer
        write_dataset(folder / "data", {"train": documents}, tokenizer, end_of_document=None, source={"name": "random"})
        path = folder / "config.yml"
        path.write_text(CONFIG.format(folder=folder, steps=STEPS))
        config = load(path)
        return bare_milliseconds(config), looped_milliseconds(config)


def bare_milliseconds(config: Config) -> float:
    """The compiled step on device batches, synchronised once at the end."""
    program, data = build(config, jax.devices()), open_data(config)
    place = Placement(program.batch)
    batches = []
    for _, batch in zip(
        range(STEPS), host_batches(data.table, data.order, config.global_batch, place.rows), strict=False
    ):
        batch.pop(ROW_IDS)
        batches.append(place(batch))
    step = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).compile()
    state, inputs = program.init(program.initial_key()), program.inputs(STEPS)
    for index, batch in enumerate(batches):
        if index == WARM:
            jax.block_until_ready(state)
            started = time.perf_counter()
        state, _ = step(state, batch, inputs)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / (STEPS - WARM) * 1000


def looped_milliseconds(config: Config) -> float:
    """The mean of the loop's own synchronised step times."""
    with contextlib.redirect_stdout(None):
        loop.run(config, jax.devices())
    seconds = [line["step_seconds"] for line in read_metrics(config.run_dir / "metrics.jsonl")]
    return statistics.mean(seconds[WARM:]) * 1000


if __name__ == "__main__":
    main()
