"""Documents too long for one record or one run."""

from pathlib import Path

import pytest

from jaxtrain.data.prepare import runs
from tests.data.prepare.corpus import content, make, text, write_corpus, write_json_lines


def test_a_long_document_is_stored_as_several_in_order_and_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LONGEST_DOCUMENT", 20)
    (tmp_path / "text").mkdir()
    write_json_lines(tmp_path / "text" / "a.jsonl", [text(16), "short"])
    dataset = make(tmp_path / "text", tmp_path / "data", held_out=0.0)
    end = dataset.manifest.tokenizer.end_of_document
    stored = [dataset.read("train", number).tolist() for number in range(dataset.manifest.splits["train"].documents)]
    long = [each for each in stored if len(each) == 20]
    assert len(long) > 3
    tokens = [token for each in stored for token in each]
    assert tokens.count(end) == 2
    first = next(number for number, each in enumerate(stored) if len(each) == 20)
    joined = [token for each in stored[first : first + len(long) + 1] for token in each]
    assert joined.index(end) == len(joined) - 1


def test_small_runs_give_the_same_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "text")
    whole = make(tmp_path / "text", tmp_path / "whole", unit_bytes=10**9)
    monkeypatch.setattr(runs, "_RUN_TOKENS", 300)
    small = make(tmp_path / "text", tmp_path / "small", unit_bytes=10**9)
    assert content(small.directory) == content(whole.directory)
