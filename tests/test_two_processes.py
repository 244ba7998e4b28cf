"""Two processes of four devices are one run: the same numbers, the same files, the same checkpoint."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import load
from jaxtrain.training_data import open_data
from tests.runs import (
    FAMILIES,
    MESHES,
    checkpoint_meta,
    checkpoint_steps,
    events,
    read_checkpoint,
    row_log,
    run_here,
    step_losses,
    stopped_copy,
    tolerance,
    train,
    train_group,
    write_tiny,
)

pytestmark = pytest.mark.slow

RUN = ["data.pack=false", "data.log_rows=true", "eval.every=20"]
OTHERS = [family for family in FAMILIES if family != "decoder"]


def write_config(folder: Path, data: Path) -> Path:
    """Twenty steps with checkpoints at 10 and 20, lr 1e-3."""
    path = write_tiny(folder, data)
    text = path.read_text().replace("steps: 10", "steps: 20").replace("every: 5", "every: 10").replace("1e-2", "1e-3")
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """The run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    run_here(load(write_config(folder, tiny_data), RUN))
    return folder / "run"


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Callable[[str], Path]:
    """Mesh name to the run of two processes on it; `data.workers` is on for one of them."""
    runs: dict[str, Path] = {}

    def run(mesh: str) -> Path:
        if mesh not in runs:
            folder = tmp_path_factory.mktemp("together")
            overrides = [*RUN, *MESHES[mesh][1], f"data.workers={2 if mesh == 'fsdp=8' else 0}"]
            results = train_group([str(write_config(folder, tiny_data)), *overrides], timeout=150)
            assert [code for code, _ in results] == [0, 0], results
            for process, (_, output) in enumerate(results):
                (folder / f"output-{process}").write_text(output)
            runs[mesh] = folder / "run"
        return runs[mesh]

    return run


STAGES = "pipeline=2 data=2 tensor=2 zero=1"
"""Each process is one stage."""
TOGETHER = ["fsdp=8", "data=2 fsdp=2 tensor=2", STAGES]


@pytest.mark.parametrize("mesh", TOGETHER)
def test_twenty_losses_equal_one_device(mesh: str, alone: Path, together: Callable[[str], Path]) -> None:
    here, there = step_losses(alone), step_losses(together(mesh))
    assert here.keys() == there.keys() == set(range(1, 21))
    np.testing.assert_allclose(list(there.values()), list(here.values()), rtol=tolerance(mesh))


@pytest.mark.parametrize("mesh", TOGETHER)
def test_the_metrics_hold_each_step_once_with_global_numbers(
    mesh: str, alone: Path, together: Callable[[str], Path]
) -> None:
    def lines(run_dir: Path) -> list[dict[str, float]]:
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]

    ours, one = lines(together(mesh)), lines(alone)
    assert [line["step"] for line in ours] == [line["step"] for line in one] == [*range(1, 21), 20]
    for name in ("tokens", "grad_norm", "learning_rate", "eval_loss"):
        wanted = [line[name] for line in one if name in line]
        assert wanted, name
        assert [line[name] for line in ours if name in line] == pytest.approx(wanted, rel=1e-4), name
    assert [event["step"] for event in events(together(mesh), "save")] == [10, 20]
    assert len(events(together(mesh), "stop")) == 1


def test_a_process_of_the_first_stage_alone_prints_the_loss(together: Callable[[str], Path], alone: Path) -> None:
    """Its devices never see the head, which the last stage computes."""
    printed = re.findall(r"step +(\d+)/20 +loss (\S+)", (together(STAGES).parent / "output-0").read_text())
    assert [int(step) for step, _ in printed] == [1, 10, 20]
    losses = step_losses(alone)
    for step, loss in printed:
        assert float(loss) == pytest.approx(losses[int(step)], rel=1e-4)


def test_stages_in_two_processes_go_on_bit_equal_after_a_stop(
    together: Callable[[str], Path], tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(together(STAGES), tmp_path, step=10)
    results = train_group([str(write_config(tmp_path, tiny_data)), *RUN, *MESHES[STAGES][1]], timeout=150)
    assert [code for code, _ in results] == [0, 0], results
    assert [event["step"] for event in events(run_dir, "restore")] == [10]
    assert step_losses(run_dir) == step_losses(together(STAGES))
    assert checkpoint_meta(run_dir, 20)["checksums"] == checkpoint_meta(together(STAGES), 20)["checksums"]


def test_each_process_read_its_own_rows_of_every_batch(together: Callable[[str], Path], alone: Path) -> None:
    whole, parts = row_log(alone), [row_log(together("fsdp=8"), process) for process in (0, 1)]
    assert all([*parts[0][step], *parts[1][step]] == whole[step] for step in range(1, 21))


def test_plain_orbax_reads_in_one_process_what_two_saved(together: Callable[[str], Path]) -> None:
    saved = read_checkpoint(together("fsdp=8"), 20)
    meta = checkpoint_meta(together("fsdp=8"), 20)
    assert {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in saved.items()} == meta["arrays"]
    assert saved["step"] == saved["optimizer.adam.count"] == 20
    assert all(np.isfinite(leaf).all() for leaf in saved.values())


@pytest.mark.parametrize("family", OTHERS)
def test_another_family_has_the_losses_of_one_device_and_its_evaluation(
    family: str, tmp_path: Path, tiny_data: Path
) -> None:
    run, mesh = [*FAMILIES[family], *RUN[1:]], MESHES["data=2 fsdp=2 tensor=2"][1]
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    run_here(load(write_config(tmp_path / "alone", tiny_data), run))
    results = train_group([str(write_config(tmp_path / "together", tiny_data)), *run, *mesh], timeout=150)
    assert [code for code, _ in results] == [0, 0], results
    one, two = (tmp_path / name / "run" for name in ("alone", "together"))
    here, there = step_losses(one), step_losses(two)
    assert here.keys() == there.keys() == set(range(1, 21))
    np.testing.assert_allclose(list(there.values()), list(here.values()), rtol=1e-5)
    last = [json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1]) for run_dir in (two, one)]
    assert last[0] == pytest.approx(last[1], rel=1e-4)
    assert "eval_loss" in last[0]


def initial(output: str) -> dict[str, dict[str, str]]:
    """Family to its parameters' checksums, from what `tests.initial_parameters` printed."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["family"]: line["checksums"] for line in lines}


def test_initial_parameters_are_bit_equal_in_programs_as_users_compile_them(tmp_path: Path, tiny_data: Path) -> None:
    """Of other families, tests/test_layouts.py compares more meshes within one process, as tests compile them."""
    path, program = str(write_tiny(tmp_path, tiny_data)), ("-m", "tests.initial_parameters")
    families = ",".join(FAMILIES)
    results = train_group([families, path, *MESHES["fsdp=8"][1]], program=program, optimised=True)
    results.append(train([families, path], program=program, optimised=True))
    devices, overrides = MESHES["data=2 fsdp=2 tensor=2"]
    results.append(train(["decoder", path, *overrides], devices, program=program, optimised=True))
    assert [code for code, _ in results] == [0, 0, 0, 0], results
    first, second, one, eight = (initial(output) for _, output in results)
    assert {family: len(leaves) for family, leaves in one.items()} == {"decoder": 12, "vit": 12, "own": 4}
    assert first == second == one
    assert eight == {"decoder": one["decoder"]}


def consumed(folder: Path, data: Path, steps: int) -> list[int]:
    """The rows of the first steps, sorted."""
    order = open_data(load(write_config(folder, data), RUN)).order
    return sorted(order.rows_at(np.arange(8 * steps)).tolist())


def test_one_process_goes_on_with_what_two_saved(
    together: Callable[[str], Path], alone: Path, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(together("fsdp=8"), tmp_path, step=10)
    first = [rows for process in (0, 1) for rows in row_log(run_dir, process).values()]
    run_here(load(write_config(tmp_path, tiny_data), RUN))
    assert [event["step"] for event in events(run_dir, "restore")] == [10]
    second = [rows for step, rows in row_log(run_dir).items() if step > 10]
    assert sorted(row for rows in [*first, *second] for row in rows) == consumed(tmp_path, tiny_data, 20)
    np.testing.assert_allclose(list(step_losses(run_dir).values()), list(step_losses(alone).values()), rtol=1e-5)


def test_two_processes_pass_over_a_damaged_checkpoint_and_go_on_with_what_one_saved(
    alone: Path, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(alone, tmp_path, step=20)
    shutil.rmtree(run_dir / "checkpoints" / "20" / "state" / "d")
    first = [rows for step, rows in row_log(run_dir).items() if step <= 10]
    results = train_group([str(write_config(tmp_path, tiny_data)), *RUN, "mesh.fsdp=8"], timeout=150)
    assert [code for code, _ in results] == [0, 0], results
    assert "checkpoints/20 can't be read" in results[0][1]
    assert [event["step"] for event in events(run_dir, "restore")] == [10]
    assert checkpoint_steps(run_dir) == [10, 20]
    second = [rows for process in (0, 1) for step, rows in row_log(run_dir, process).items() if step > 10]
    assert sorted(row for rows in [*first, *second] for row in rows) == consumed(tmp_path, tiny_data, 20)
    np.testing.assert_allclose(list(step_losses(run_dir).values()), list(step_losses(alone).values()), rtol=1e-5)
