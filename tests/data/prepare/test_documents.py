"""Text comes out of every format as it is, and what can't be read is named by file and line."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.data.prepare import find_files
from jaxtrain.data.prepare.documents import read_unit, split_text
from jaxtrain.data.prepare.sources import plan_units
from jaxtrain.errors import ConfigError


def read(path: Path, unit_bytes: int = 1 << 20, key: str = "text", skip: bool = False) -> list[str | None]:
    """Every document of a file or folder; None for one that was passed over."""
    texts: list[str | None] = []
    held = ""
    for unit in plan_units(find_files([str(path)]), key, unit_bytes):
        for piece in read_unit(unit, key, skip):
            if piece.text is None:
                texts.append(None)
                continue
            held += piece.text
            if piece.last:
                texts.append(held)
                held = ""
    assert held == ""
    return texts


TEXTS = ["one", "", "zwei\r\nLinien", "🙂" * 50, 'with "quotes"\\n and \t tabs', "long " * 300, "end"]


@pytest.mark.parametrize("unit_bytes", [1, 7, 40, 300, 10**6])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_each_json_line_is_read_once_wherever_units_are_cut(tmp_path: Path, unit_bytes: int, ending: str) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + ending)
    assert read(tmp_path / "a.jsonl", unit_bytes) == TEXTS


def test_plain_text_is_one_document_as_it_is_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    content = "erste\r\nzweite\n\n 🙂"
    (tmp_path / "a.md").write_bytes(content.encode("utf-8-sig"))
    assert read(tmp_path / "a.md") == [content]


def test_compressed_files_are_read_as_what_they_hold(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(b"plain")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(b'{"text": "one"}\n{"text": "two"}')
    assert read(tmp_path) == ["plain", "one", "two"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_each_parquet_row_is_read_once(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"n": list(range(7)), "body": pa.array(TEXTS).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for unit_bytes in (1, 200, 10**6):
        assert read(tmp_path / "a.parquet", unit_bytes, key="body") == TEXTS


def test_a_long_text_comes_in_pieces_that_end_with_lines() -> None:
    text = "".join(f"line {number}\n" for number in range(1000)) + "x" * 250 + " " + "y" * 50
    for chunk in (1, 37, 10_000):
        chunks = [text[start : start + chunk] for start in range(0, len(text), chunk)]
        pieces = list(split_text(chunks, most=100))
        assert pieces == list(split_text([text], most=100)), "whatever the chunks"
        assert "".join(piece for piece, _ in pieces) == text
        assert all(len(piece) <= 100 for piece, _ in pieces)
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(piece.endswith("\n") for piece, _ in pieces[:80])


BAD_LINES = {
    b'{"text": "unfinished': r"a\.jsonl:3: not JSON",
    b'["text"]': r"a\.jsonl:3: not a JSON object",
    b'{"body": "x", "id": 1}': r"a\.jsonl:3: has no key 'text'; there are body, id: choose one with --text-key",
    b'{"text": 17}': r"a\.jsonl:3: 'text' holds 17, not text",
    b'{"text": null}': r"a\.jsonl:3: 'text' holds null, not text",
    b'{"text": "\\ud800"}': r"a\.jsonl:3: 'text' holds a lone surrogate",
    b'{"text": "\xff"}': r"a\.jsonl:3: not UTF-8",
    b"[" * 100_000: r"a\.jsonl:3: not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:25].decode("latin-1"))
@pytest.mark.parametrize("unit_bytes", [5, 10**6])
def test_a_line_that_cannot_be_used_is_named_or_passed_over(tmp_path: Path, line: bytes, unit_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(ConfigError, match=BAD_LINES[line] + ".*; mend it, or .*--skip-invalid"):
        read(tmp_path / "a.jsonl", unit_bytes)
    assert read(tmp_path / "a.jsonl", unit_bytes, skip=True) == ["one", None, "two"]


@pytest.mark.parametrize("before", [10, 2**20 - 1, 2**20, 2**21 + 5])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82", b"\xe2\x82\n"])
def test_text_that_is_not_utf_8_is_named_by_its_line_or_passed_over(tmp_path: Path, before: int, bad: bytes) -> None:
    lines = b"a\n" * (before // 2) + b"a" * (before % 2)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + lines + bad)
    with pytest.raises(ConfigError, match=rf"a\.txt:{before // 2 + 1}: not UTF-8"):
        read(tmp_path / "a.txt")
    assert read(tmp_path / "a.txt", skip=True) == [None]


def test_parquet_without_the_column_is_refused_with_those_there_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: has no column 'text'; there are id, body: choose one with"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"column 'id' holds int64, not text; columns of text are body"):
        read(tmp_path / "a.parquet", key="id")


def test_parquet_rows_without_text_are_named_or_passed_over(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1: 'text' holds null, not text"):
        read(tmp_path / "a.parquet", unit_bytes=1)
    assert read(tmp_path / "a.parquet", skip=True) == ["one", None, "two"]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.txt.gz"])
def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 but not really" * 10)
    with pytest.raises(ConfigError, match=rf"{name}: (can't be read|not a Parquet file)"):
        read(tmp_path / name)


def test_a_compressed_file_cut_short_is_an_error(tmp_path: Path) -> None:
    content = gzip.compress(b'{"text": "one two three"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: can't be read"):
        read(tmp_path / "a.jsonl.gz")
