from pathlib import Path

import pytest

from jaxtrain.data import ensure_python_stdlib, python_stdlib
from jaxtrain.data.python_stdlib import stdlib_files
from jaxtrain.errors import ConfigError, DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(100):
        (folder / f"module{number:03d}.py").write_text(f"value = {number}\n")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "site-packages/numpy/core.py",
        "test/test_ast.py",
        "unittest/test/testmock/support.py",
        "idlelib/editor.py",
        "lib2to3/pygram.py",
        "encodings/cp1252.py",
        "pydoc_data/topics.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "notes.txt",
    ],
)
def test_what_is_not_the_library_itself_is_left_out(library: Path, name: str) -> None:
    (library / name).parent.mkdir(parents=True, exist_ok=True)
    (library / name).write_text("left = 'out'\n")
    (library / "json").mkdir()
    (library / "json" / "decoder.py").write_text("kept = 'in'\n")
    names = [file.name for file in stdlib_files(library)]
    assert names == ["json/decoder.py", *(f"module{number:03d}.py" for number in range(100))]


def test_undecodable_empty_and_repeated_files_are_left_out(library: Path) -> None:
    (library / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'Grüße'\n".encode("latin-1"))
    (library / "empty.py").write_text("\n")
    (library / "twin.py").write_text("value = 7\n")
    names = [file.name for file in stdlib_files(library)]
    assert names == [f"module{number:03d}.py" for number in range(100)]


def test_a_python_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 0 source files here"):
        stdlib_files(tmp_path)


@pytest.mark.slow
def test_the_running_pythons_library_becomes_a_data_set(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    dataset = ensure_python_stdlib(tmp_path / "data", 1024, 0.05, lambda *report: reports.append(report))
    train, held_out = dataset.manifest.splits["train"], dataset.manifest.splits["held_out"]
    assert dataset.manifest.tokenizer.vocab_size == 1024
    assert train.tokens > 2_000_000
    assert len(train.shards) > 1
    assert 0.02 < held_out.documents / (train.documents + held_out.documents) < 0.08
    stages = list(dict.fromkeys(what for what, _, _ in reports))
    assert stages == ["training the tokenizer, MB", "tokenising, MB", "writing shards"]
    assert reports[-1][1:] == (len(train.shards) + len(held_out.shards),) * 2


def small_library(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    monkeypatch.setattr(python_stdlib, "stdlib_files", lambda: stdlib_files(library))


def test_it_is_prepared_once_and_then_opened_without_its_source(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_library(monkeypatch, library)
    first = ensure_python_stdlib(tmp_path / "data", 300, 0.2)
    monkeypatch.delattr(python_stdlib, "stdlib_files")
    assert ensure_python_stdlib(tmp_path / "data", 300, 0.2).manifest_hash == first.manifest_hash


def test_one_made_with_other_settings_is_refused(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_library(monkeypatch, library)
    ensure_python_stdlib(tmp_path / "data", 300, 0.2)
    for vocab, held_out, words in ((301, 0.2, "vocab 300, not 301"), (300, 0.3, r"held_out 0\.2, not 0\.3")):
        with pytest.raises(ConfigError, match=words + ": choose another directory or delete this one"):
            ensure_python_stdlib(tmp_path / "data", vocab, held_out)
