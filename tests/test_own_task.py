"""The example in scripts/: a task and data of one's own, run from a folder outside, as a user would."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import load
from jaxtrain.telemetry.metrics import read_metrics
from tests.runs import COMPILE_CACHE, ROOT, events, start, step_losses, stopped_copy

EXAMPLE = ROOT / "scripts" / "own_task.py"
SHORT = [f"compile_cache={COMPILE_CACHE}", "steps=200", "eval.every=100", "checkpoint.every=100", "data.rows=1024"]


def train(folder: Path, *overrides: str, devices: int = 1, expected: int = 0) -> str:
    """`python -m jaxtrain.train own_task.yml` in `folder`, with a copy of the example and nothing else."""
    for name in ("own_task.py", "own_task.yml"):
        shutil.copy(EXAMPLE.with_name(name), folder)
    process = start(["own_task.yml", *SHORT, "run_dir=run", *overrides], devices, cwd=folder)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == expected, output
    return output


def evaluations(run_dir: Path) -> list[float]:
    return [line["eval_loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in line]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the example, left alone."""
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder / "run"


def test_the_example_fits_on_a_page() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_its_config_opens_as_those_that_are_shipped() -> None:
    text = EXAMPLE.with_suffix(".yml").read_text()
    assert load(EXAMPLE.with_suffix(".yml")).steps == 1000
    assert all(word in text for word in ("python -m jaxtrain.train own_task.yml", "# Needs", "4,352", "# Expect"))


@pytest.mark.slow
def test_the_example_learns_the_wave_down_to_its_noise(straight: Path) -> None:
    first, last = evaluations(straight)
    variance, noise = 0.18, 0.05**2
    assert step_losses(straight)[1] == pytest.approx(variance, rel=0.5)
    assert noise < last < first < variance / 4


@pytest.mark.slow
def test_it_goes_on_bit_equal_with_loader_processes_that_find_the_module_too(straight: Path, tmp_path: Path) -> None:
    run_dir = stopped_copy(straight, tmp_path, step=100)
    train(tmp_path, "data.workers=2")
    assert [event["step"] for event in events(run_dir, "restore")] == [100]
    assert step_losses(run_dir) == step_losses(straight)
    assert evaluations(run_dir) == evaluations(straight)


@pytest.mark.slow
def test_it_trains_sharded_over_eight_devices_with_the_same_losses(straight: Path, tmp_path: Path) -> None:
    output = train(tmp_path, "mesh.fsdp=8", devices=8)
    assert "fsdp 8" in output
    ours, theirs = step_losses(tmp_path / "run"), step_losses(straight)
    np.testing.assert_allclose(
        [ours[step] for step in range(1, 11)], [theirs[step] for step in range(1, 11)], rtol=1e-5
    )
    np.testing.assert_allclose(evaluations(tmp_path / "run"), evaluations(straight), rtol=1e-2)


@pytest.mark.slow
def test_a_wrong_key_ends_with_code_2_and_one_line_before_anything_is_written(tmp_path: Path) -> None:
    output = train(tmp_path, "model.widht=3", expected=2)
    assert output == (
        "error: override model.widht=3: unknown key model.widht: own_task:Regression doesn't take it; "
        "did you mean width?\n"
    )
    assert not (tmp_path / "run").exists()
