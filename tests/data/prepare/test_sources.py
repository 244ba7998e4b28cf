"""Files, folders and globs: each file once, in an order that does not depend on how it was named."""

import itertools
import os
from pathlib import Path

import pytest

from jaxtrain.data.prepare import find_files
from jaxtrain.data.prepare.sources import plan_units
from jaxtrain.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/one.jsonl", "a/deep/two.jsonl", "a/.hidden", ".git/config", "c.parquet.txt"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    return tmp_path / "text"


def names(*sources: str | Path) -> list[str]:
    return [file.name for file in find_files([str(source) for source in sources])]


def test_a_folder_gives_everything_below_it_but_what_is_hidden(folder: Path) -> None:
    assert names(folder) == ["a/deep/two.jsonl", "a/one.jsonl", "b.txt", "c.parquet.txt"]


def test_globs_and_files_give_what_they_match_once(folder: Path) -> None:
    assert names(folder / "**" / "*.jsonl") == ["a/deep/two.jsonl", "a/one.jsonl"]
    assert names(folder / "*.txt") == ["b.txt", "c.parquet.txt"]
    assert names(folder / "b.txt", folder / "*.txt", folder / "b.txt") == ["b.txt", "c.parquet.txt"]


def test_files_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("another")
    assert names(folder / "b.txt", tmp_path / "b.txt") == ["b.txt", "b.txt#2"]


def test_a_file_or_folder_whose_name_looks_like_a_glob_is_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "[x]").mkdir()
    (tmp_path / "[x]" / "a*.txt").write_text("content")
    assert names(tmp_path / "[x]") == names(tmp_path / "[x]" / "a*.txt") == ["a*.txt"]


def test_links_are_followed_but_not_in_circles(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "d.txt").write_text("content")
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "circle").symlink_to(folder)
    assert names(folder) == ["a/deep/two.jsonl", "a/one.jsonl", "b.txt", "c.parquet.txt", "link/d.txt"]


def test_a_data_set_that_lies_in_its_own_source_is_no_part_of_it(folder: Path) -> None:
    wanted = find_files([str(folder)])
    for own in ("a/data/manifest.json", "a/data.unfinished/dataset/x", "a/data.lock", "a/data-too/d.txt"):
        (folder / own).parent.mkdir(parents=True, exist_ok=True)
        (folder / own).write_text("content")
    found = find_files([str(folder), str(folder / "a" / "*")], folder / "a" / "data")
    assert [file for file in found if file.name != "a/data-too/d.txt"] == wanted
    assert len(found) == len(wanted) + 1


def test_a_pipe_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: is a pipe or a device.*to a file"):
        names(tmp_path / "pipe")


@pytest.mark.parametrize("source", ["none.txt", "*.jsonl", "empty", "none/**/*.txt"])
def test_a_source_that_matches_nothing_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="matches no file"):
        names(tmp_path / source)


def test_units_cover_every_byte_once_and_depend_on_the_files_alone(folder: Path) -> None:
    (folder / "big.jsonl").write_text("x" * 1000)
    files = find_files([str(folder)])
    for size in (1, 7, 100, 10**6):
        units = plan_units(files, "text", size)
        assert [unit.number for unit in units] == list(range(len(units)))
        assert sum(unit.bytes for unit in units) == sum(file.bytes for file in files)
        covered = [(part.file.name, part.start, part.stop) for unit in units for part in unit.parts]
        for file in files:
            ranges = [(start, stop) for name, start, stop in covered if name == file.name]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == file.bytes
            assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
