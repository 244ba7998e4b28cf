"""Which entries of a directory are checkpoints, and how they go."""

import shutil
from pathlib import Path

import pytest

from jaxtrain.checkpoint.directory import delete, list_checkpoints, set_aside, state_path, step_path


def make_checkpoint(directory: Path, name: str, without: str = "") -> Path:
    path = directory / name
    path.mkdir(parents=True)
    for part in {"state", "meta"} - {without}:
        (path / part).mkdir()
        (path / part / "array").write_text(name)
    if without != "_CHECKPOINT_METADATA":
        (path / "_CHECKPOINT_METADATA").touch()
    return path


def test_a_missing_directory_holds_nothing(tmp_path: Path) -> None:
    listing = list_checkpoints(tmp_path / "none")
    assert (listing.steps, listing.incomplete, listing.leftovers) == ([], [], [])


def test_steps_are_sorted_by_number_newest_first(tmp_path: Path) -> None:
    for step in ("9", "10", "100"):
        make_checkpoint(tmp_path, step)
    assert list_checkpoints(tmp_path).steps == [100, 10, 9]


@pytest.mark.parametrize("without", ["state", "meta", "_CHECKPOINT_METADATA"])
def test_a_checkpoint_that_lacks_a_part_is_incomplete(tmp_path: Path, without: str) -> None:
    make_checkpoint(tmp_path, "5")
    lacking = make_checkpoint(tmp_path, "8", without)
    listing = list_checkpoints(tmp_path)
    assert listing.steps == [5]
    assert listing.incomplete == [lacking]


def test_an_empty_directory_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    assert list_checkpoints(tmp_path).incomplete == [tmp_path / "7"]


@pytest.mark.parametrize("name", ["9.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp-0", "9.deleting"])
def test_what_interrupted_work_leaves_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    left = make_checkpoint(tmp_path, name)
    listing = list_checkpoints(tmp_path)
    assert listing.steps == []
    assert listing.leftovers == [left]


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("10.unreadable", "notes", "-3"):
        make_checkpoint(tmp_path, name)
    listing = list_checkpoints(tmp_path)
    assert (listing.steps, listing.incomplete, listing.leftovers) == ([], [], [])


def test_a_step_set_aside_twice_keeps_both(tmp_path: Path) -> None:
    names = [set_aside(make_checkpoint(tmp_path, "10"), "unreadable").name for _ in range(3)]
    assert names == ["10.unreadable", "10.unreadable-1", "10.unreadable-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_deleted_checkpoint_stops_being_one_before_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "5")
    seen = []
    remove = shutil.rmtree

    def slow_removal(doomed: Path, **options: bool) -> None:
        seen.append((list_checkpoints(tmp_path).steps, (doomed / "state" / "array").exists()))
        remove(doomed, **options)

    monkeypatch.setattr(shutil, "rmtree", slow_removal)
    delete(path)
    assert seen == [([], True)]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_deletion_is_finished(tmp_path: Path) -> None:
    delete(make_checkpoint(tmp_path, "5.deleting"))
    assert list(tmp_path.iterdir()) == []


def test_the_state_lies_below_its_step(tmp_path: Path) -> None:
    assert step_path(tmp_path, 5) == tmp_path / "5"
    assert state_path(tmp_path, 5) == tmp_path / "5" / "state"


@pytest.mark.parametrize("name", ["007", "\u0663"])
def test_a_name_that_no_step_has_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "7")
    make_checkpoint(tmp_path, name)
    listing = list_checkpoints(tmp_path)
    assert (listing.steps, listing.incomplete) == ([7], [])
