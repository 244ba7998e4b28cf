"""A spike in a run: told, skipped or gone back from; and always the same, whatever is saved or killed in between."""

import gc
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.batches import RunBatches
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.data import ROW_IDS, host_batches
from jaxtrain.errors import DivergedError
from jaxtrain.models.parameters import named_leaves
from jaxtrain.placement import Placement
from jaxtrain.telemetry.jsonl import read
from jaxtrain.training_data import open_data
from tests.faults import with_wrong_targets
from tests.runs import (
    MESHES,
    checkpoint_meta,
    checkpoint_steps,
    crash_after,
    events,
    run_here,
    step_losses,
    tiny_config,
    train_group,
    train_on,
    train_steps,
    write_tiny,
)

WATCH = [
    "spikes.window=8",
    "spikes.threshold=5",
    "spikes.grad_norm=off",
    "spikes.rewind_back=5",
    "spikes.rewind_over=1",
]
RUN = ["steps=36", "checkpoint.every=10", "checkpoint.keep=9", "data.log_rows=true", "model.dropout=0.1", *WATCH]
POSITION = 8 * 29
"""Of the batch of step 30, whose targets are wrong."""


def run_with(*overrides: str) -> list[str]:
    """`RUN` with other keys, or other values of its own."""
    return [f"{key}={value}" for key, value in dict(text.split("=", 1) for text in (*RUN, *overrides)).items()]


@pytest.fixture
def wrong_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunBatches, "__next__", with_wrong_targets({POSITION}))


def positions(run_dir: Path) -> list[int]:
    return [line["position"] for line in read(run_dir / "rows-0.jsonl")]


def test_a_spike_that_is_told_changes_nothing(wrong_targets: None, tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, *run_with("spikes.loss=off", f"run_dir={tmp_path / 'off'}"))
    run_here(config)
    config = tiny_config(tmp_path, tiny_data, *run_with("spikes.loss=warn"))
    run_here(config)
    (spike,) = events(config.run_dir, "spike")
    assert (spike["step"], spike["position"], spike["action"]) == (30, POSITION, "warn")
    assert spike["loss"] == step_losses(config.run_dir)[30] > spike["limit"]["loss"]
    assert step_losses(config.run_dir) == step_losses(tmp_path / "off")
    assert events(tmp_path / "off", "spike") == []


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_a_spike_that_is_skipped_leaves_the_state_bit_unchanged(
    mesh: str, wrong_targets: None, tmp_path: Path, tiny_data: Path
) -> None:
    devices, overrides = MESHES[mesh]
    config = tiny_config(tmp_path, tiny_data, *run_with(*overrides, "spikes.loss=skip"))
    run_here(config, devices)
    (spike,) = events(config.run_dir, "spike")
    assert (spike["step"], spike["position"], spike["action"]) == (30, POSITION, "skip")
    losses = step_losses(config.run_dir)
    assert sorted(losses) == list(range(1, 37))
    assert max(losses[step] for step in range(28, 37)) < 4
    meta = checkpoint_meta(config.run_dir, 36)
    assert (meta["skipped"], meta["position"]) == (1, 8 * 37)
    assert [line["position"] for line in read(config.run_dir / "rows-0.jsonl") if line["skipped"]] == [POSITION]
    assert positions(config.run_dir) == list(range(0, 8 * 37, 8))


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_saves_kills_and_resumes_around_a_spike_change_no_bit(
    policy: str, wrong_targets: None, tmp_path: Path, tiny_data: Path
) -> None:
    """The limits of later steps too: they are as they would be if the loop had never stood still."""
    run = [f"spikes.loss={policy}", "checkpoint.keep=99", "checkpoint.every=13"]
    straight = tiny_config(tmp_path, tiny_data, *run_with(*run, f"run_dir={tmp_path / 'straight'}"))
    run_here(straight)
    killed = tiny_config(tmp_path, tiny_data, *run_with(*run))
    # A rewind goes elsewhere where there are other checkpoints, so with rewinds the same are saved.
    saving = tiny_config(tmp_path, tiny_data, *run_with(*run, *(["checkpoint.every=1"] if policy == "skip" else [])))
    after = 31 if policy == "skip" else 20
    for config, step in [(killed, 22), (killed, 28), (killed, after), (saving, 32)]:
        with crash_after(step):
            run_here(config)
    run_here(killed)
    assert step_losses(killed.run_dir) == step_losses(straight.run_dir)
    ours, theirs = (checkpoint_meta(config.run_dir, 36) for config in (killed, straight))
    assert ours["checksums"] == theirs["checksums"]
    assert ours["spikes"] == theirs["spikes"]
    assert len(ours["spikes"]["numbers"]) == 9
    assert ours["position"] == theirs["position"]
    rows = "rows-0.jsonl"
    assert (killed.run_dir / rows).read_text() == (straight.run_dir / rows).read_text()


def test_a_rewind_goes_on_from_before_the_spike_behind_the_rows_that_hurt(
    wrong_targets: None, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(
        tmp_path, tiny_data, *run_with("spikes.loss=rewind", "checkpoint.every=4", "telemetry.norms_every=1")
    )
    run_here(config)
    (rewind,) = events(config.run_dir, "rewind")
    assert (rewind["step"], rewind["to"], rewind["position"]) == (30, 24, POSITION + 16)
    losses = step_losses(config.run_dir)
    assert sorted(losses) == list(range(1, 37)), "steps 25 to 30 were done again"
    assert max(losses[step] for step in range(25, 37)) < 4
    assert [line["step"] for line in read(config.run_dir / "norms.jsonl")] == list(range(1, 37))
    expected = [*range(0, 8 * 24, 8), *range(POSITION + 16, POSITION + 16 + 8 * 12, 8)]
    assert positions(config.run_dir) == expected
    meta = checkpoint_meta(config.run_dir, 28)
    assert meta["position"] == POSITION + 16 + 8 * 4, "the checkpoint of step 28 is the new one"
    assert checkpoint_steps(config.run_dir) == [4, 8, 12, 16, 20, 24, 28, 32, 36]


def test_after_a_rewind_the_run_is_that_of_its_checkpoint_at_the_other_position(
    wrong_targets: None, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, tiny_data, *run_with("spikes.loss=rewind"))
    run_here(config)
    monkeypatch.undo()
    before = train_steps(config, 20)
    data = open_data(config)
    rows = Placement(before.program.batch).rows
    later = host_batches(data.table, data.order, 8, rows, start=POSITION + 16, prefetch=0)
    batches = [
        {name: value for name, value in batch.items() if name != ROW_IDS} for batch in itertools.islice(later, 5)
    ]
    after = train_on(before.program, batches, 36, before.state)
    assert [step_losses(config.run_dir)[step] for step in range(21, 26)] == after.losses.tolist()


def test_a_rewind_lets_the_old_state_go_before_it_reads_the_other(
    wrong_targets: None, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back, alive = Checkpointer.go_back_to, []

    def counting(checkpointer: Checkpointer, step: int, state: Any) -> Any:
        gc.collect()
        shape = named_leaves(state)["params.head.projection"].shape
        own = [array for array in jax.live_arrays() if not any(array is other for other in others)]
        alive.append(sum(array.shape == shape and not array.is_deleted() for array in own))
        return go_back(checkpointer, step, state)

    others = jax.live_arrays()  # of tests before this one
    monkeypatch.setattr(Checkpointer, "go_back_to", counting)
    run_here(tiny_config(tmp_path, tiny_data, *run_with("spikes.loss=rewind")))
    assert alive == [0]


def test_where_a_rewind_has_no_place_to_go_the_run_goes_on(
    wrong_targets: None, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *run_with("spikes.loss=rewind", "checkpoint.every=0"))
    run_here(config)
    (spike,) = events(config.run_dir, "spike")
    assert spike["action"] == "none"
    assert events(config.run_dir, "rewind") == []
    assert sorted(step_losses(config.run_dir)) == list(range(1, 37))


def test_numbers_that_are_not_finite_may_be_gone_back_from_too(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunBatches, "__next__", with_wrong_targets({POSITION}, np.nan))
    config = tiny_config(tmp_path, tiny_data, *run_with("non_finite=rewind"))
    run_here(config)
    assert [(event["step"], event["to"]) for event in events(config.run_dir, "rewind")] == [(29, 20)]
    assert checkpoint_meta(config.run_dir, 36)["position"] == POSITION + 16 + 8 * 16


def test_spikes_in_a_row_end_the_run_with_its_own_code(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunBatches, "__next__", with_wrong_targets(range(POSITION, 10**6)))
    config = tiny_config(tmp_path, tiny_data, *run_with("spikes.loss=skip", "spikes.in_a_row=4"))
    with pytest.raises(DivergedError, match=r"step 30: loss 6.*, above .*; 4 interventions"):
        run_here(config)
    assert len(events(config.run_dir, "spike")) == 4
    assert events(config.run_dir, "stop")[-1]["exit_code"] == 13
    assert max(step_losses(config.run_dir)) == 29


def test_a_run_that_has_diverged_ends_with_the_same_code(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunBatches, "__next__", with_wrong_targets(range(8 * 60, 10**6)))
    config = tiny_config(tmp_path, tiny_data, *run_with("steps=100", "spikes.loss=off", "spikes.diverged_after=8"))
    with pytest.raises(DivergedError, match="spikes.diverged_after"):
        run_here(config)
    assert events(config.run_dir, "stop")[-1]["exit_code"] == 13


@pytest.mark.slow
def test_two_processes_rewind_as_one(tmp_path: Path, tiny_data: Path) -> None:
    arguments = [f"wrong-targets={POSITION}", str(write_tiny(tmp_path, tiny_data)), *RUN, "mesh.fsdp=8"]
    run_dir = tmp_path / "run"
    results = train_group([*arguments, "spikes.loss=rewind"], timeout=180, program=("-m", "tests.faults"))
    assert [code for code, _ in results] == [0, 0], results
    assert [event["action"] for event in events(run_dir, "spike")] == ["rewind"]
    assert [(event["step"], event["to"]) for event in events(run_dir, "rewind")] == [(30, 20)]
    assert sorted(step_losses(run_dir)) == list(range(1, 37))
    for process in range(2):
        lines = read(run_dir / f"rows-{process}.jsonl")
        assert POSITION not in [line["position"] for line in lines]
