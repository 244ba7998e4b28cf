"""A new run begins with another run's parameters, and with nothing else of it."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.errors import CheckpointError, ConfigError
from tests.factories import make_dataset, make_documents
from tests.runs import (
    MESHES,
    STRAIGHT,
    Straight,
    checkpoint_meta,
    content,
    crash_after,
    events,
    read_checkpoint,
    row_log,
    run_here,
    step_losses,
    stopped_copy,
    tiny_config,
    tiny_program,
    train_group,
    write_tiny,
)


@pytest.fixture
def source(straight: Straight, tmp_path: Path) -> Path:
    """The directory of a finished run with checkpoints 5 and 10; it may be changed."""
    return stopped_copy(straight("one device"), tmp_path / "source", step=10)


@pytest.mark.parametrize("mesh", ["one device", "data=2 fsdp=2 tensor=2"])
def test_the_parameters_are_taken_and_all_else_is_new(mesh: str, source: Path, tmp_path: Path, tiny_data: Path) -> None:
    devices, overrides = MESHES[mesh]
    # With a learning rate of 0 the parameters stay what they were at the start.
    still = ["steps=2", "optimizer.learning_rate=0", "optimizer.name=sgd", "seed=3", "data.log_rows=true"]
    config = tiny_config(tmp_path, tiny_data, f"init_from={source}@5", *still, *overrides)
    run_here(config, devices)
    theirs, ours = read_checkpoint(source, 5), read_checkpoint(config.run_dir, 2)
    names = [name for name in theirs if name.startswith("params.")]
    assert len(names) == 12
    for name in names:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert ours["step"] == 2
    assert "optimizer.momentum.trace.embed.table" in ours
    assert sorted(row_log(config.run_dir)) == [1, 2]
    assert checkpoint_meta(config.run_dir, 2)["position"] == 16
    assert [event["step"] for event in events(config.run_dir, "start")] == [0]


def test_the_first_loss_is_that_of_the_parameters_at_the_data_s_beginning(
    source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, f"init_from={source}", "steps=2", "optimizer.schedule={kind: constant}")
    first = step_losses_of(config)[1]
    random = tiny_config(tmp_path, tiny_data, f"run_dir={tmp_path / 'random'}", "steps=2")
    assert first < step_losses_of(random)[1] - 0.3, "ten steps of training were worth something"


def step_losses_of(config) -> dict[int, float]:
    run_here(config)
    return step_losses(config.run_dir)


def test_it_is_recorded_where_the_run_came_from(source: Path, tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, f"init_from={source}", "steps=4", "checkpoint.every=2")
    with crash_after(3):
        run_here(config)
    (event,) = events(config.run_dir, "init_from")
    assert (event["checkpoint"], event["step"]) == (str(source / "checkpoints" / "10"), 10)
    run_here(config)
    wanted = {
        "run": str(source),
        "checkpoint": str(source / "checkpoints" / "10"),
        "step": 10,
        "data_hash": checkpoint_meta(source, 10)["data_hash"],
    }
    assert json.loads((config.run_dir / "run.json").read_text())["init_from"] == wanted
    assert checkpoint_meta(config.run_dir, 4)["origin"] == wanted


def test_a_run_that_goes_on_neither_reads_nor_needs_the_other_run(
    source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, f"init_from={source}", *STRAIGHT, f"run_dir={tmp_path / 'alone'}")
    run_here(config)
    stopped = tiny_config(tmp_path, tiny_data, f"init_from={source}", *STRAIGHT)
    with crash_after(7):
        run_here(stopped)
    shutil.rmtree(source)
    run_here(stopped)
    assert [event["step"] for event in events(stopped.run_dir, "restore")] == [5]
    assert len(events(stopped.run_dir, "init_from")) == 1
    assert step_losses(stopped.run_dir) == step_losses(config.run_dir)


def test_a_run_that_died_before_its_first_checkpoint_takes_them_again(
    source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, f"init_from={source}@5", *STRAIGHT)
    with crash_after(3):
        run_here(config)
    first = step_losses(config.run_dir)
    run_here(config)
    assert {step: step_losses(config.run_dir)[step] for step in first} == first
    assert len(events(config.run_dir, "init_from")) == 2


def test_a_run_can_t_be_given_another_beginning_later(source: Path, tmp_path: Path, tiny_data: Path) -> None:
    run_here(tiny_config(tmp_path, tiny_data, "steps=1"))
    with pytest.raises(ConfigError, match=r"init_from: +null +-> "):
        run_here(tiny_config(tmp_path, tiny_data, "steps=1", f"init_from={source}"))


def refusal(folder: Path, data: Path, *overrides: str) -> list[str]:
    """The lines of the message of a start that is refused; fails if it wrote anything."""
    config = tiny_config(folder, data, *overrides)
    with pytest.raises(ConfigError) as error:
        run_here(config)
    assert content(config.run_dir) == {}
    assert error.value.exit_code == 2
    return str(error.value).splitlines()


def test_another_model_is_refused_with_every_array_and_the_keys_that_differ(
    source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    lines = refusal(
        tmp_path, tiny_data, f"init_from={source}", "model.mlp=96", "model.qk_norm=true", "model.dropout=0.5"
    )
    assert lines[0] == f"init_from={source}: {source / 'checkpoints' / '10'} has other params than this model:"
    assert "  params.layers.mlp.gate is float32[2, 64, 128] in the checkpoint, float32[2, 64, 96] here" in lines
    assert [line for line in lines if "is not in the checkpoint" in line], lines
    start = lines.index("these keys differ from that run's:")
    assert [" ".join(line.split()) for line in lines[start + 1 : start + 3]] == [
        "model.mlp: 128 -> 96",
        "model.qk_norm: false -> true",
    ]
    assert lines[-1] == "set them as in that run; nothing is cast, cut or left out silently"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "model.vocab=512",
            "model.vocab: a row of the embedding belongs to a token of that run's tokenizer: "
            "none can be cut off or made up",
        ),
        (
            "model.tied_embeddings=true",
            "model.tied_embeddings: a tied model has no output head of its own: its embedding is the head",
        ),
    ],
)
def test_another_vocabulary_or_tied_embeddings_are_explained(
    override: str, line: str, source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    assert line in refusal(tmp_path, tiny_data, f"init_from={source}", override)


@pytest.mark.parametrize(
    ("name", "message"),
    [("source/run@7", "no complete checkpoint of step 7; there are 5, 10"), ("nowhere", "nowhere: no such directory")],
)
def test_a_run_or_step_that_isn_t_there_is_refused_with_what_is(
    name: str, message: str, source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    (line,) = refusal(tmp_path, tiny_data, f"init_from={tmp_path / name}")
    assert message in line


def test_damaged_parameters_end_the_start_and_no_older_step_is_taken(
    source: Path, tmp_path: Path, tiny_data: Path
) -> None:
    shutil.rmtree(source / "checkpoints" / "10" / "state" / "d")
    with pytest.raises(CheckpointError, match=r"checkpoints/10 can't be read: .*other steps there: 5"):
        run_here(tiny_config(tmp_path, tiny_data, f"init_from={source}"))


def test_other_data_and_another_computation_with_the_same_shapes_are_remarked(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path / "other", make_documents([20] * 20, seed=9))
    run_here(tiny_config(tmp_path, tmp_path / "other", f"init_from={source}", "steps=1", "model.rope.theta=500.0"))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"warning: init_from={source} was trained on another data set" in printed
    assert "make sure that both have the same tokenizer" in printed
    assert "the model computes something else with them: model.rope.theta: 10000.0 -> 500.0" in printed


def test_the_same_data_and_model_are_not_remarked(
    source: Path, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tiny_config(tmp_path, tiny_data, f"init_from={source}", "steps=1", "model.dropout=0.5"))
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["ema={decay: 0.9}"], ["optimizer.frozen=[embed.*]", "ema={decay: 0.9}"]])
def test_a_state_that_adopts_parameters_is_that_of_a_run_that_drew_them(more: list[str]) -> None:
    program = tiny_program(8, "mesh.fsdp=8", *more)
    drawn = program.init(program.initial_key())
    copied = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding), drawn["params"])
    adopted = program.adopt(copied)
    assert jax.tree.structure(adopted) == jax.tree.structure(drawn)
    for ours, theirs in zip(jax.tree.leaves(adopted), jax.tree.leaves(drawn), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert ours.sharding == theirs.sharding


@pytest.mark.slow
def test_two_processes_begin_with_what_one_saved(source: Path, tmp_path: Path, tiny_data: Path) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), f"init_from={source}@5", "optimizer.learning_rate=0"]
    results = train_group([*arguments, "mesh.fsdp=8"])
    assert [code for code, _ in results] == [0, 0], results
    theirs, ours = (checkpoint_meta(path, 5)["checksums"] for path in (source, tmp_path / "run"))
    names = [name for name in theirs if name.startswith("params.")]
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
