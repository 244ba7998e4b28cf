"""TensorBoard shows what metrics.jsonl says, each step once, whatever was killed and resumed in between."""

from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import dump, load
from jaxtrain.errors import ConfigError
from jaxtrain.telemetry.jsonl import read
from tests.event_files import read_scalars, read_texts
from tests.runs import (
    crash_after,
    kill_when,
    run_here,
    start,
    tiny_config,
    train,
    train_group,
    write_tiny,
)


def assert_same_as_metrics(run_dir: Path) -> None:
    """Every number of metrics.jsonl stands in the event files, once and in order, and no other."""
    wanted: dict[str, list[tuple[int, float]]] = {}
    for line in read(run_dir / "metrics.jsonl"):
        for name, value in line.items():
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            if name != "step":
                wanted.setdefault(tag, []).append((line["step"], float(np.float32(value))))
    assert read_scalars(run_dir / "tensorboard") == wanted
    assert wanted["train/loss"]


def test_the_event_files_hold_what_metrics_jsonl_holds_and_the_config(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "eval.every=4")
    run_here(config)
    assert_same_as_metrics(config.run_dir)
    assert [step for step, _ in read_scalars(config.run_dir / "tensorboard")["eval/loss"]] == [4, 8, 10]
    ((step, _, text),) = read_texts(config.run_dir / "tensorboard")
    assert step == 1
    assert "".join(line.removeprefix("    ") for line in text.splitlines(keepends=True)) == dump(config)


def test_after_a_crash_and_a_resume_each_step_stands_once(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=12", "eval.every=3")
    with crash_after(8):
        run_here(config)
    assert_same_as_metrics(config.run_dir)
    assert max(step for step, _ in read_scalars(config.run_dir / "tensorboard")["train/loss"]) == 8
    run_here(config)
    assert_same_as_metrics(config.run_dir)
    assert [step for step, _ in read_scalars(config.run_dir / "tensorboard")["train/loss"]] == list(range(1, 13))
    assert len(read_texts(config.run_dir / "tensorboard")) == 2


def test_switched_off_it_writes_nothing_but_still_drops_steps_that_come_again(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data)
    with crash_after(8):
        run_here(config)
    off = tiny_config(tmp_path, tiny_data, "telemetry.tensorboard=false")
    run_here(off)
    assert [step for step, _ in read_scalars(config.run_dir / "tensorboard")["train/loss"]] == [1, 2, 3, 4, 5]
    elsewhere = tiny_config(tmp_path, tiny_data, "telemetry.tensorboard=false", f"run_dir={tmp_path / 'other'}")
    run_here(elsewhere)
    assert not (elsewhere.run_dir / "tensorboard").exists()


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data)
    config.run_dir.mkdir()
    (config.run_dir / "tensorboard").touch()
    with pytest.raises(ConfigError, match=r"tensorboard: File exists"):
        run_here(config)


@pytest.mark.slow
def test_a_killed_process_loses_none_of_its_values(tmp_path: Path, tiny_data: Path) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), "steps=40", "checkpoint.every=20", "eval.every=7"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    kill_when(lambda: metrics.exists() and len(read(metrics)) > 26, [start(arguments)])
    killed = [line["step"] for line in read(metrics) if "loss" in line]
    shown = [step for step, _ in read_scalars(tmp_path / "run" / "tensorboard")["train/loss"]]
    assert shown in (killed, killed[:-1]), "all but perhaps the one that was being written"
    code, output = train(arguments)
    assert code == 0, output
    assert_same_as_metrics(tmp_path / "run")


@pytest.mark.slow
def test_of_two_processes_the_first_alone_writes(tmp_path: Path, tiny_data: Path) -> None:
    results = train_group([str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=8"], timeout=150)
    assert [code for code, _ in results] == [0, 0], results
    assert_same_as_metrics(load(write_tiny(tmp_path, tiny_data), []).run_dir)
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
