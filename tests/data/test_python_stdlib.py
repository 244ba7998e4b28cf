from pathlib import Path

import pytest

from jaxtrain.data import ensure_python_stdlib
from jaxtrain.data.python_stdlib import stdlib_documents
from jaxtrain.errors import DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(100):
        (tmp_path / f"module{number:03d}.py").write_text(f"value = {number}\n")
    return tmp_path


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
    names = [text.name for text in stdlib_documents(library)]
    assert names == ["json/decoder.py", *(f"module{number:03d}.py" for number in range(100))]


def test_undecodable_empty_and_repeated_files_are_left_out(library: Path) -> None:
    (library / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'Grüße'\n".encode("latin-1"))
    (library / "empty.py").write_text("\n")
    (library / "twin.py").write_text("value = 7\n")
    names = [text.name for text in stdlib_documents(library)]
    assert names == [f"module{number:03d}.py" for number in range(100)]


def test_a_python_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 0 source files here"):
        stdlib_documents(tmp_path)


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
    assert stages == ["reading documents", "training the tokenizer", "writing documents"]
    assert reports[-1][1:] == (train.documents + held_out.documents,) * 2
