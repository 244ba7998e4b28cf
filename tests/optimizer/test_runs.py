"""Each optimizer and schedule in a whole run: what is logged, what is saved, what is compiled."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxtrain.config import Config
from tests.runs import (
    checkpoint_meta,
    crash_after,
    events,
    read_checkpoint,
    run_here,
    step_losses,
    tiny_config,
    train,
    write_tiny,
)

RUNS: dict[str, list[str]] = {
    "adamw, cosine": [],
    "sgd, constant": ["optimizer.name=sgd", "optimizer.schedule.kind=constant"],
    "adafactor, linear": ["optimizer={name: adafactor, factored_from: 16}", "optimizer.schedule.kind=linear"],
    "lion, wsd": ["optimizer.name=lion", "optimizer.schedule={kind: wsd, decay: 0.5, decay_shape: sqrt}"],
    "muon, inverse_sqrt, another rate for the embedding": [
        "optimizer={name: muon, factors: {embedding: 0.3}}",
        "optimizer.schedule.kind=inverse_sqrt",
    ],
}


OFTEN = ("adafactor, linear", "muon, inverse_sqrt, another rate for the embedding")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in RUNS])
def test_a_run_that_is_stopped_three_times_has_the_same_rates_losses_and_state(
    name: str, tmp_path: Path, tiny_data: Path
) -> None:
    overrides = [*RUNS[name], "optimizer.schedule.warmup=3", "checkpoint.every=1", "checkpoint.keep=20"]

    def config(run: str) -> Config:
        return tiny_config(tmp_path, tiny_data, *overrides, f"run_dir={tmp_path / run}")

    straight = [line["learning_rate"] for line in run_here(config("straight"))]
    for step in (3, 4, 6):
        with crash_after(step):
            run_here(config("stopped"))
    stopped = [line["learning_rate"] for line in run_here(config("stopped"))]
    assert [event["step"] for event in events(tmp_path / "stopped", "restore")] == [2, 3, 5]
    assert stopped == straight
    assert straight[2] == max(straight) == pytest.approx(config("straight").optimizer.learning_rate)
    assert step_losses(tmp_path / "stopped") == step_losses(tmp_path / "straight")
    sums = [checkpoint_meta(tmp_path / run, 10)["checksums"] for run in ("straight", "stopped")]
    assert sums[0] == sums[1]


def test_what_a_checkpoint_of_adamw_and_sgd_is_called_stays_as_it_was(tmp_path: Path, tiny_data: Path) -> None:
    """Runs that began before there were other optimizers go on."""
    for name, moments in (("adamw", ("adam.mu", "adam.nu")), ("sgd", ("momentum.trace",))):
        config = tiny_config(tmp_path, tiny_data, f"optimizer.name={name}", "steps=1", f"run_dir={tmp_path / name}")
        run_here(config)
        found = set(read_checkpoint(config.run_dir, 1))
        params = {key.removeprefix("params.") for key in found if key.startswith("params.")}
        want = {f"optimizer.{moment}.{param}" for moment in moments for param in params}
        want |= {"optimizer.adam.count"} if name == "adamw" else set()
        assert found - {f"params.{param}" for param in params} == want | {"step"}


@pytest.mark.slow
def test_a_sweep_over_rates_schedules_and_lengths_compiles_the_train_step_once(tmp_path: Path, tiny_data: Path) -> None:
    cache = tmp_path / "cache"

    def entries(run: str, overrides: Sequence[str]) -> set[str]:
        arguments = [f"run_dir={tmp_path / run}", f"compile_cache={cache}", "ema={decay: 0.9}", *overrides]
        code, output = train([str(write_tiny(tmp_path, tiny_data)), *arguments])
        assert code == 0, output
        return {path.name for path in cache.rglob("*") if "train_step" in path.name and "-cache" in path.name}

    first = entries("a", ["optimizer.learning_rate=1e-3"])
    assert len(first) == 1
    schedule = "optimizer.schedule={kind: wsd, decay: 0.3, warmup: 4}"
    assert entries("b", ["optimizer.learning_rate=2e-3", "steps=8", schedule]) == first
    assert entries("c", ["optimizer.b1=0.8"]) > first
