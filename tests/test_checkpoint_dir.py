"""Checkpoints apart from the run: whose they are, and what happens when either is moved."""

import json
import shutil
from pathlib import Path

import pytest

from jaxtrain.continuation import OWNER_FILE
from jaxtrain.errors import ConfigError
from jaxtrain.saved_run import find_checkpoint
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_meta,
    content,
    crash_after,
    events,
    read_checkpoint,
    run_here,
    step_losses,
    stopped_copy,
    tiny_config,
)


def apart(folder: Path, data: Path, *overrides: str, run: str = "run", checkpoints: str = "apart"):
    places = [f"run_dir={folder / run}", f"checkpoint.dir={folder / checkpoints}"]
    return tiny_config(folder, data, *STRAIGHT, *places, *overrides)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.isdecimal())


def refused(config, *parts: str) -> None:
    """A start is refused with these words, and touches neither directory."""
    folders = (config.run_dir, config.checkpoint_dir)
    before = [content(folder) for folder in folders]
    with pytest.raises(ConfigError) as error:
        run_here(config)
    assert [content(folder) for folder in folders] == before
    for part in parts:
        assert part in str(error.value)


def test_a_run_saves_resumes_and_deletes_there_and_only_there(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    config = apart(tmp_path, tiny_data, "checkpoint.keep=1")
    with crash_after(7):
        run_here(config)
    assert steps_in(tmp_path / "apart") == ["5"]
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [5]
    assert steps_in(tmp_path / "apart") == ["10"]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert step_losses(config.run_dir) == step_losses(straight("one device"))
    assert find_checkpoint(str(config.run_dir)).path == tmp_path / "apart" / "10"
    shutil.copytree(tmp_path / "apart", tmp_path / "copy" / "checkpoints")
    ours = read_checkpoint(tmp_path / "copy", 10)
    assert checkpoint_meta(tmp_path / "copy", 10)["checksums"].keys() == ours.keys()


def test_relative_directories_are_those_of_the_shell(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, "run_dir=runs/a", "checkpoint.dir=big/a")
    monkeypatch.chdir(tmp_path / "here")
    with crash_after(7):
        run_here(config)
    assert steps_in(tmp_path / "here" / "big" / "a") == ["5"]
    run_dir = f"run_dir={tmp_path / 'here' / 'runs' / 'a'}"
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused(
        tiny_config(tmp_path, tiny_data, *STRAIGHT, run_dir, "checkpoint.dir=big/a"),
        f"{tmp_path / 'here' / 'big' / 'a'} holds its steps up to 5; set checkpoint.dir back, or move them",
    )
    monkeypatch.chdir(tmp_path / "here")
    run_here(config)
    assert [event["step"] for event in events(tmp_path / "here" / "runs" / "a", "restore")] == [5]


def test_two_runs_can_t_have_the_same_directory(tmp_path: Path, tiny_data: Path) -> None:
    first, second = apart(tmp_path, tiny_data), apart(tmp_path, tiny_data, run="second")
    with crash_after(2):  # before its first checkpoint
        run_here(first)
    owner = f"belongs to the run in {tmp_path / 'run'}"
    refused(second, owner, "choose another checkpoint.dir", f"init_from={tmp_path / 'run'}")
    run_here(first)
    refused(second, owner)
    refused(apart(tmp_path, tiny_data, run="third", checkpoints="run/checkpoints/../../apart"), owner)


def test_the_directory_within_another_run_is_that_run_s(tmp_path: Path, tiny_data: Path) -> None:
    first = tiny_config(tmp_path, tiny_data, *STRAIGHT)
    with crash_after(7):
        run_here(first)
    refused(
        apart(tmp_path, tiny_data, run="second", checkpoints="run/checkpoints"),
        f"belongs to the run in {tmp_path / 'run'}",
    )


def test_a_run_that_starts_between_the_look_and_the_claim_of_another_is_noticed(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxtrain.checkpoint import Checkpointer

    first, second = apart(tmp_path, tiny_data), apart(tmp_path, tiny_data, run="second")
    claim = Checkpointer.claim

    def late(checkpointer: Checkpointer) -> None:
        monkeypatch.setattr(Checkpointer, "claim", claim)
        with crash_after(2):
            run_here(first)
        claim(checkpointer)

    monkeypatch.setattr(Checkpointer, "claim", late)
    with pytest.raises(ConfigError, match=f"belongs to the run in {tmp_path / 'run'}"):
        run_here(second)
    assert json.loads((tmp_path / "apart" / OWNER_FILE).read_text()) == {"run_dir": str(tmp_path / "run")}


@pytest.mark.parametrize("moved", ["run", "apart", "both"])
def test_a_run_or_its_checkpoints_may_be_moved(moved: str, straight: Straight, tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(7):
        run_here(apart(tmp_path, tiny_data))
    run, checkpoints = ("new" if moved in (name, "both") else name for name in ("run", "apart"))
    if run == "new":
        run = (tmp_path / "run").rename(tmp_path / "new run").name
    if checkpoints == "new":
        checkpoints = (tmp_path / "apart").rename(tmp_path / "new place").name
    config = apart(tmp_path, tiny_data, run=run, checkpoints=checkpoints)
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [5]
    assert step_losses(config.run_dir) == step_losses(straight("one device"))
    owner = json.loads((config.checkpoint_dir / OWNER_FILE).read_text())
    assert owner == {"run_dir": str(config.run_dir)}


def test_a_moved_run_with_its_checkpoints_in_it_goes_on(straight: Straight, tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(7):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT, f"run_dir={moved}"))
    assert [event["step"] for event in events(moved, "restore")] == [5]
    assert step_losses(moved) == step_losses(straight("one device"))


def test_checkpoints_whose_run_directory_is_gone_go_on_in_a_new_one(tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(7):
        run_here(apart(tmp_path, tiny_data))
    shutil.rmtree(tmp_path / "run")
    config = apart(tmp_path, tiny_data, run="second")
    run_here(config)
    assert sorted(step_losses(config.run_dir)) == [6, 7, 8, 9, 10]


def test_a_run_whose_checkpoint_dir_was_changed_is_not_begun_anew(tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(7):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    refused(apart(tmp_path, tiny_data), f"{tmp_path / 'run' / 'checkpoints'} holds its steps up to 5")
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "apart")
    config = apart(tmp_path, tiny_data)
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [5]
    refused(tiny_config(tmp_path, tiny_data, *STRAIGHT), f"{tmp_path / 'apart'} holds its steps up to 10")


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    with crash_after(7):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused(
        tiny_config(tmp_path, tiny_data, *STRAIGHT),
        "holds no checkpoint, but this run has saved some, last at step 5; put them back, or choose another run_dir",
    )
    stopped_copy(straight("one device"), tmp_path / "copy")  # a copy without its events has nothing to say
    run_here(tiny_config(tmp_path / "copy", tiny_data, *STRAIGHT))
