"""A drill passes only where losses, rows and the last checkpoint are those of the undisturbed run."""

import json
import shutil
from pathlib import Path

import pytest

from jaxtrain.config import Config
from jaxtrain.drilling.comparison import Finding, compare
from tests.runs import STRAIGHT, Straight, tiny_config


@pytest.fixture
def both(straight: Straight, tmp_path: Path, tiny_data: Path) -> tuple[Config, Config]:
    """The configs of an undisturbed run and of one with the same files."""
    configs = []
    for name in ("undisturbed", "disturbed"):
        shutil.copytree(straight("one device"), tmp_path / name / "run")
        configs.append(tiny_config(tmp_path / name, tiny_data, *STRAIGHT))
    return configs[0], configs[1]


def edit(path: Path, number: int, **changes: object) -> None:
    """Changes one line of a file of JSON lines; a negative number counts from the end."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number] |= changes
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def failed(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if not finding.passed]


def test_the_same_files_pass(both: tuple[Config, Config]) -> None:
    findings = compare(*both, tolerance=0)
    assert failed(findings) == []
    assert [finding.found for finding in findings] == [
        "bit-equal over 10 steps",
        "the same 80 rows, each in its batch",
        "step 10, every bit the same",
    ]


def test_another_loss_fails_unless_the_layout_was_another_one(both: tuple[Config, Config]) -> None:
    metrics = both[1].run_dir / "metrics.jsonl"
    loss = json.loads(metrics.read_text().splitlines()[3])["loss"]
    edit(metrics, 3, loss=loss * (1 + 1e-6))
    assert failed(compare(*both, tolerance=0)) == ["losses of all steps"]
    assert failed(compare(*both, tolerance=1e-5)) == []
    assert failed(compare(*both, tolerance=1e-7)) == ["losses of all steps"]


def test_another_row_fails(both: tuple[Config, Config]) -> None:
    rows = both[1].run_dir / "rows-0.jsonl"
    edit(rows, 4, rows=json.loads(rows.read_text().splitlines()[5])["rows"])
    assert failed(compare(*both, tolerance=1e-5)) == ["rows of all batches"]


def test_a_step_that_is_missing_and_a_checkpoint_that_is_missing_fail(both: tuple[Config, Config]) -> None:
    metrics = both[1].run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(both[1].checkpoint_dir / "10")
    assert failed(compare(*both, tolerance=1e-5)) == ["losses of all steps", "last checkpoint"]
