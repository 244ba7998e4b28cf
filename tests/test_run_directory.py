"""A run directory belongs to one config: what may change on resume, what is refused, and what it holds."""

import json
from pathlib import Path

import pytest

from jaxtrain.config import difference, load
from jaxtrain.errors import ConfigError
from jaxtrain.run_directory import RunDirectory
from tests.factories import make_dataset, make_documents
from tests.runs import (
    STRAIGHT,
    Straight,
    content,
    crash_after,
    events,
    run_here,
    step_losses,
    stopped_copy,
    tiny_config,
)


def refused(folder: Path, data: Path, *overrides: str) -> str:
    """The message of a start that is refused; fails if it touched anything."""
    run_dir = folder / "run"
    before = content(run_dir)
    config = tiny_config(folder, data, *STRAIGHT, *overrides)
    with pytest.raises(ConfigError) as error:
        run_here(config)
    assert content(run_dir) == before
    return str(error.value)


def test_another_config_in_a_used_directory_is_refused_with_every_changed_key(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    stopped_copy(straight("one device"), tmp_path)
    message = refused(tmp_path, tiny_data, "model.embed=96", "optimizer.b2=0.9", "log_every=3")
    lines = [" ".join(line.split()) for line in message.splitlines()]
    assert "model.embed: 64 -> 96" in lines
    assert "optimizer.b2: 0.95 -> 0.9" in lines
    assert "log_every" not in message
    assert "choose another run_dir" in message


def test_a_used_directory_is_refused_where_resume_is_off(straight: Straight, tmp_path: Path, tiny_data: Path) -> None:
    stopped_copy(straight("one device"), tmp_path)
    message = refused(tmp_path, tiny_data, "resume=false")
    assert f"run_dir={tmp_path / 'run'} already holds a run and resume is false" in message


def test_checkpoints_of_another_run_in_a_shared_directory_are_refused(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    foreign = stopped_copy(straight("one device"), tmp_path / "other") / "checkpoints"
    message = refused(tmp_path, tiny_data, f"checkpoint.dir={foreign}", "model.embed=96")
    assert "model.embed" in message
    assert not (tmp_path / "run").exists()
    assert "already holds a run" in refused(tmp_path, tiny_data, f"checkpoint.dir={foreign}", "resume=false")


def test_a_new_directory_may_be_started_with_resume_off(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=2", "resume=false")
    run_here(config)
    assert sorted(step_losses(config.run_dir)) == [1, 2]


def test_a_run_that_died_before_its_first_checkpoint_still_owns_its_directory(tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(2):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert "model.embed" in refused(tmp_path, tiny_data, "model.embed=96")
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT)
    run_here(config)
    assert sorted(step_losses(config.run_dir)) == list(range(1, 11))


def test_other_data_than_the_run_began_with_are_refused(straight: Straight, tmp_path: Path) -> None:
    stopped_copy(straight("one device"), tmp_path)
    make_dataset(tmp_path / "other-data", make_documents([20] * 52, seed=9))
    message = refused(tmp_path, tmp_path / "other-data")
    assert f"data.dir={tmp_path / 'other-data'}: the data are others than the run was started on" in message


def test_keys_that_may_change_change_and_the_resolved_config_says_so(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    changed = ["log_every=2", "microbatch=4", "checkpoint.every=2", "checkpoint.keep=9", "data.prefetch=0"]
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, *changed)
    run_here(config)
    assert [event["step"] for event in events(run_dir, "save")] == [6, 8, 10]
    saved = RunDirectory(run_dir).saved_config()
    assert difference(saved, config) == []
    assert saved["checkpoint"]["every"] == 2


def test_the_saved_config_is_the_whole_config_and_loads_again(straight: Straight, tmp_path: Path) -> None:
    run_dir = straight("one device")
    again = load(run_dir / "config.yml", [])
    assert again.model.dropout == 0.5
    assert again.model.mlp == 128
    assert difference(RunDirectory(run_dir).saved_config(), again) == []
    assert again.optimizer.b2 == 0.95, "defaults are written too"
    assert "b2: 0.95" in (run_dir / "config.yml").read_text()


def test_a_damaged_saved_config_is_refused_by_its_name(tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(2):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    (tmp_path / "run" / "config.yml").write_text("steps: [")
    assert f"{tmp_path / 'run' / 'config.yml'}: can't be read" in refused(tmp_path, tiny_data)


def test_run_json_tells_what_is_needed_to_repeat_the_run(straight: Straight, tiny_data: Path) -> None:
    info = json.loads((straight("fsdp=8") / "run.json").read_text())
    assert info["devices"] | {"mesh": None} == {
        "platform": "cpu",
        "kind": "cpu",
        "count": 8,
        "processes": 1,
        "mesh": None,
    }
    assert info["devices"]["mesh"]["fsdp"] == 8
    assert info["seed"] == 0
    assert len(info["data_manifest_hash"]) == 64
    assert info["packages"].keys() >= {"jax", "flax", "optax", "orbax-checkpoint", "grain"}


def test_events_tell_the_story_in_order(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "eval.every=5")
    with crash_after(7):
        run_here(config)
    run_here(config)
    kinds = [(event["kind"], event.get("step")) for event in map(json.loads, (config.run_dir / "events.jsonl").open())]
    compiles = [("compile", None)] * 3
    # A save is reported when it is committed, in the background: anywhere after it began. Progress is told every ten
    # seconds, after the first step, and before anything that ends stepping.
    first, second = kinds[: kinds.index(("stop", 7)) + 1], kinds[kinds.index(("stop", 7)) + 1 :]
    assert [event for event in first if event[0] not in ("save", "progress")] == [
        ("start", 0),
        *compiles,
        ("eval", 5),
        ("stop", 7),
    ]
    assert [event for event in second if event[0] not in ("save", "progress")] == [
        ("start", 5),
        *compiles,
        ("restore", 5),
        ("eval", 10),
        ("stop", 10),
    ]
    told = [
        first.index(event) for event in (("progress", 1), ("progress", 5), ("eval", 5), ("progress", 7), ("stop", 7))
    ]
    assert told == sorted(told)
    told = [second.index(event) for event in (("restore", 5), ("progress", 6), ("progress", 10), ("eval", 10))]
    assert told == sorted(told)
    assert ("save", 5) in first
    assert second.index(("save", 10)) > second.index(("eval", 10))
    stop = events(config.run_dir, "stop")[0]
    assert (stop["exit_code"], stop["reason"]) == (1, "Crash: ")


def test_metrics_carry_what_the_readme_promises(straight: Straight) -> None:
    lines = [json.loads(line) for line in (straight("one device") / "metrics.jsonl").open()]
    names = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "data_wait"}
    assert all(line.keys() == names for line in lines)
    assert all(0 <= line["data_wait"] <= 1 and line["step_seconds"] > 0 for line in lines)
