"""A data set is the same to the byte, whoever makes it and whatever is killed on the way."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.data import open_dataset
from jaxtrain.data.prepare.runs import TokeniseUnits
from jaxtrain.data.prepare.shards import WriteShards
from jaxtrain.errors import ConfigError, DataError
from tests.data.prepare.corpus import KILLED, ROOT, content, documents, make, run, text, write_corpus, write_json_lines


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(source, tmp_path_factory.mktemp("undisturbed") / "data").directory


def test_every_document_of_every_format_is_in_one_split_in_full(undisturbed: Path, source: Path) -> None:
    found = documents(open_dataset(undisturbed))
    assert sorted(found["train"] + found["held_out"]) == sorted(text(number) for number in range(100))
    assert 8 <= len(found["held_out"]) <= 32
    assert len(list(undisturbed.glob("train-*.arrayrecord"))) > 2


@pytest.mark.parametrize(("workers", "unit_bytes"), [(1, 10**9), (1, 500), (2, 4000), (3, 1500)])
def test_processes_and_units_do_not_change_a_byte(
    source: Path, undisturbed: Path, tmp_path: Path, workers: int, unit_bytes: int
) -> None:
    made = make(source, tmp_path / "data", workers, unit_bytes=unit_bytes)
    assert content(made.directory) == content(undisturbed)


def test_where_the_source_lies_does_not_change_a_byte(source: Path, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "elsewhere" / "other name")
    made = make(tmp_path / "elsewhere" / "other name", tmp_path / "data")
    assert content(made.directory) == content(undisturbed)


REPORTS = [
    "training the tokenizer, MB#5",
    "tokenising, MB#1",
    "tokenising, MB#4",
    "tokenising, MB#7",
    "writing shards#1",
    "writing shards#3",
    "writing shards#5",  # the last one: what is left is to put the pieces together
]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_every_stage_in_turn_it_ends_with_the_same_bytes(
    source: Path, undisturbed: Path, tmp_path: Path, workers: int
) -> None:
    for step in REPORTS if workers == 1 else REPORTS[1::2]:
        assert run(source, tmp_path / "data", workers, die_at=step).returncode == KILLED, step
        assert not (tmp_path / "data").exists()
        assert (tmp_path / "data.unfinished").is_dir()
    ended = run(source, tmp_path / "data", workers)
    assert ended.returncode == 0, ended.stderr
    assert content(tmp_path / "data") == content(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data.lock"]


class Interrupted(Exception):
    pass


def interrupt_at(what: str, done: int) -> object:
    calls = []

    def report(stage: str, reached: int, total: int) -> None:
        if stage == what:
            calls.append(reached)
            if len(calls) == done + 1:
                raise Interrupted

    return report


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units and shards that were made, not found."""
    made: list[str] = []
    tokenise, write = TokeniseUnits._tokenise, WriteShards._write

    def counted_unit(task, unit, tokenizer):  # type: ignore[no-untyped-def]
        made.append(f"unit {unit.number}")
        return tokenise(task, unit, tokenizer)

    def counted_shard(task, plan):  # type: ignore[no-untyped-def]
        made.append(plan.file)
        return write(task, plan)

    monkeypatch.setattr(TokeniseUnits, "_tokenise", counted_unit)
    monkeypatch.setattr(WriteShards, "_write", counted_shard)
    return made


def test_what_is_finished_is_not_done_twice(source: Path, undisturbed: Path, tmp_path: Path, worked: list[str]) -> None:
    for stage, done in (("tokenising, MB", 5), ("writing shards", 2)):
        with pytest.raises(Interrupted):
            make(source, tmp_path / "data", report=interrupt_at(stage, done))
    make(source, tmp_path / "data")
    assert len(worked) == len(set(worked)) > 10
    assert content(tmp_path / "data") == content(undisturbed)


@pytest.mark.parametrize(
    ("stage", "damaged", "again"),
    [
        ("tokenising, MB", "units/train-00002-000.tokens", "unit 2"),
        ("tokenising, MB", "units/train-00002-000.npy", "unit 2"),
        ("tokenising, MB", "units/00002.json", "unit 2"),
        ("writing shards", "dataset/train-00001-of-*.arrayrecord", "train-00001-of"),
        ("writing shards", "train-00001-of-*.lengths.npy", "train-00001-of"),
    ],
)
def test_what_was_damaged_since_is_done_again(
    source: Path, undisturbed: Path, tmp_path: Path, worked: list[str], stage: str, damaged: str, again: str
) -> None:
    with pytest.raises(Interrupted):
        make(source, tmp_path / "data", report=interrupt_at(stage, 4))
    (path,) = (tmp_path / "data.unfinished").glob(damaged)
    path.write_bytes(path.read_bytes()[:-2] + b"??")
    worked.clear()
    make(source, tmp_path / "data")
    assert [made for made in worked if made.startswith(again)]
    assert "unit 0" not in worked
    assert content(tmp_path / "data") == content(undisturbed)


def test_an_unfinished_one_of_other_files_or_settings_leaves_no_trace(
    source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "more")
    write_json_lines(tmp_path / "more" / "zzz.jsonl", [text(number) for number in range(100, 160)])
    for changes in ({}, {"seed": 7}, {"held_out": 0.5}, {"shard_tokens": 1000}):
        with pytest.raises(Interrupted):
            make(tmp_path / "more", tmp_path / "data", report=interrupt_at("writing shards", 2), **changes)
    make(source, tmp_path / "data")
    assert content(tmp_path / "data") == content(undisturbed)


def test_a_finished_one_is_opened_and_another_one_is_refused_with_what_differs(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "text")
    made = make(tmp_path / "text", tmp_path / "data")
    before = content(made.directory)
    assert make(tmp_path / "text", tmp_path / "data").manifest_hash == made.manifest_hash
    for changes, words in {
        "held_out": (0.3, r"held_out 0\.2, not 0\.3"),
        "seed": (1, "seed 0, not 1"),
        "vocab": (301, "vocab 300, not 301"),
    }.items():
        with pytest.raises(ConfigError, match=words[1]):
            make(tmp_path / "text", tmp_path / "data", **{changes: words[0]})
    (tmp_path / "text" / "new.txt").write_text("new")
    with pytest.raises(ConfigError, match=r"data: holds a data set that was made with files 23, not 24; .*delete"):
        make(tmp_path / "text", tmp_path / "data")
    assert content(made.directory) == before


def test_a_directory_that_holds_something_else_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="data: not empty and not a data set"):
        make(source, tmp_path / "data")
    assert (tmp_path / "data" / "thesis.tex").read_text() == "mine"


def test_a_damaged_data_set_is_not_prepared_over(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "data")
    (tmp_path / "data" / "train-lengths.npy").unlink()
    with pytest.raises(DataError, match=r"train-lengths.npy: missing"):
        make(source, tmp_path / "data")


def test_a_prepared_data_set_is_opened_without_a_lock_so_it_may_be_read_only(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "data")
    (tmp_path / "data.lock").unlink()
    make(source, tmp_path / "data")
    assert not (tmp_path / "data.lock").exists()


WAITING = """
import sys
from pathlib import Path
from tests.data.prepare.corpus import make

def report(what, done, total):
    line = what.split(" that ")[0]
    print(line, flush=True)
    if line == sys.argv[3]:
        sys.stdin.readline()

print(make(Path(sys.argv[1]), Path(sys.argv[2]), report=report).manifest_hash, flush=True)
"""


def test_two_processes_at_once_make_one_data_set(source: Path, undisturbed: Path, tmp_path: Path) -> None:
    def start(stop_at: str = "") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", WAITING, str(source), str(tmp_path / "data"), stop_at]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read_until(process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdout is not None
        for read in process.stdout:
            if read.strip() == line:
                return
        raise AssertionError(f"ended before {line!r}")

    first = start(stop_at="tokenising, MB")
    read_until(first, "tokenising, MB")
    second = start()
    read_until(second, "waiting for the process")
    result = first.communicate("\n" * 100)[0].split()[-1]
    rest = second.communicate()[0].split()
    assert (first.returncode, second.returncode) == (0, 0)
    assert rest == [result]  # not a word of preparing
    assert content(tmp_path / "data") == content(undisturbed)


def test_documents_are_shuffled_by_the_seed_over_all_files(source: Path, undisturbed: Path, tmp_path: Path) -> None:
    order = documents(open_dataset(undisturbed))["train"]
    numbers = [int(each.split()[1]) for each in order]
    assert numbers != sorted(numbers)
    sources = [number < 20 for number in numbers]
    assert sum(a != b for a, b in itertools.pairwise(sources)) > 10, "files are mixed"
    other = documents(make(source, tmp_path / "data", seed=1))["train"]
    assert sorted(other) == sorted(order)
    assert other != order


def test_a_document_is_held_out_by_its_text_alone(tmp_path: Path) -> None:
    """Equal documents stay together, a larger share only adds, and more files move nothing."""
    (tmp_path / "few").mkdir()
    write_json_lines(tmp_path / "few" / "a.jsonl", [text(number) for number in range(60)])
    few = documents(make(tmp_path / "few", tmp_path / "one"))
    shutil.copytree(tmp_path / "few", tmp_path / "all")
    write_json_lines(tmp_path / "all" / "0.jsonl", [text(number) for number in range(90)])
    everything = documents(make(tmp_path / "all", tmp_path / "two"))
    assert set(few["held_out"]) == set(everything["held_out"]) & {text(number) for number in range(60)}
    assert not set(everything["held_out"]) & set(everything["train"])
    more = documents(make(tmp_path / "few", tmp_path / "three", held_out=0.5))
    assert set(few["held_out"]) < set(more["held_out"])


def test_settings_that_make_no_data_set_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a vocabulary of 256 is too small"):
        make(source, tmp_path / "data", vocab=256)
    with pytest.raises(ConfigError, match="a vocabulary of 1000000000 is too large: at most 1048576"):
        make(source, tmp_path / "data", vocab=10**9)
    for share in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=rf"held_out {share} is no share"):
            make(source, tmp_path / "data", held_out=share)
    with pytest.raises(ConfigError, match="held_out 1e-09 leaves held_out without a document"):
        make(source, tmp_path / "data", held_out=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["data.lock"]


def test_nothing_need_be_held_out(source: Path, tmp_path: Path) -> None:
    splits = make(source, tmp_path / "data", held_out=0.0).manifest.splits
    assert (splits["train"].documents, splits["held_out"].documents) == (100, 0)
    assert splits["held_out"].shards == ()


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_json_lines(tmp_path / "text" / "a.jsonl", ["", "one", " \n", "two", "three"])
    (tmp_path / "text" / "empty.txt").write_text("")
    made = make(tmp_path / "text", tmp_path / "data", held_out=0.0)
    assert (made.manifest.source["documents"], made.manifest.source["empty"]) == (3, 3)
    assert sorted(documents(made)["train"]) == ["one", "three", "two"]


def test_files_without_a_document_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="leaves train without a document.*0 documents, 1 empty"):
        make(tmp_path / "text", tmp_path / "data")


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "a.jsonl"
    write_json_lines(path, [text(number) for number in range(60)])

    def report(what: str, done: int, total: int) -> None:
        if what == "tokenising, MB":
            write_json_lines(path, ["other"])

    with pytest.raises(ConfigError, match=r"a\.jsonl: changed while it was prepared: run it again"):
        make(tmp_path / "text", tmp_path / "data", report=report)
    assert not (tmp_path / "data").exists()
