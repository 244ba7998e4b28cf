"""A config that a checkpoint holds becomes a config again."""

from pathlib import Path

import pytest

from jaxtrain.config import from_saved, load
from jaxtrain.errors import ConfigError


def saved(folder: Path) -> dict:
    path = folder / "config.yml"
    path.write_text("run_dir: runs/a\nsteps: 5\nmodel: {rope: {theta: 5e5}}\noptimizer: {name: sgd, momentum: 0.5}\n")
    return load(path).to_dict()


def test_what_was_saved_comes_back_equal(tmp_path: Path) -> None:
    assert from_saved(saved(tmp_path), "runs/a/checkpoints/5") == load(tmp_path / "config.yml")


def test_overrides_go_over_it(tmp_path: Path) -> None:
    config = from_saved(saved(tmp_path), "here", ["optimizer.name=adamw", "optimizer.b1=0.8", "mesh.fsdp=2"])
    assert (config.optimizer.b1, config.mesh.fsdp, config.model.rope.theta) == (0.8, 2, 5e5)


def test_sets_without_a_cadence_are_for_training_to_refuse(tmp_path: Path) -> None:
    assert from_saved(saved(tmp_path), "here", ["eval.every=0", "eval.sets.a=d"]).eval.sets.own_keys == {"a": Path("d")}


def test_faults_are_placed_where_it_was_saved_or_at_the_override(tmp_path: Path) -> None:
    values = {**saved(tmp_path), "of_the_future": 1}
    with pytest.raises(ConfigError) as error:
        from_saved(values, "runs/a/checkpoints/5", ["log_evry=7"])
    assert "runs/a/checkpoints/5: unknown key of_the_future" in str(error.value)
    assert "override log_evry=7: unknown key log_evry; did you mean log_every?" in str(error.value)


def test_a_reader_with_other_batches_is_free_to_choose_a_mesh_but_not_one_that_splits_the_model_unevenly(
    tmp_path: Path,
) -> None:
    values = {**saved(tmp_path), "global_batch": 8}
    assert from_saved(values, "here", ["mesh.data=16"]).mesh.data == 16
    with pytest.raises(ConfigError, match="mesh.tensor=7"):
        from_saved(values, "here", ["mesh.tensor=7"])
