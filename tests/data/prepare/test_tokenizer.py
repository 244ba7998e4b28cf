"""The tokenizer that is there, or trained: what ends a document, and that nothing of a text is lost."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from jaxtrain.data.prepare.tokenizer import load_tokenizer, train_tokenizer
from jaxtrain.errors import ConfigError
from tests.data.prepare.corpus import documents, make, text, write_json_lines
from tests.factories import byte_tokenizer


def hugging_face(folder: Path, told: dict[str, Any] | None, special: str = "</s>") -> Path:
    """A folder as the transformers library saves it, with truncation and padding asked for."""
    folder.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(special)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    if told is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("told", [{"eos_token": "</s>"}, {"eos_token": {"content": "</s>", "special": True}}])
def test_a_hugging_face_folder_tells_what_ends_a_document(tmp_path: Path, told: dict[str, Any]) -> None:
    folder = hugging_face(tmp_path / "hf", told)
    assert load_tokenizer(folder).end_id == load_tokenizer(folder / "tokenizer.json").end_id == 256
    assert load_tokenizer(folder, "a").end_of_document == "a"


def test_the_special_tokens_map_is_asked_too(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"model_max_length": 5})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert load_tokenizer(folder).end_of_document == "</s>"


def test_a_tokenizer_that_ends_no_document_is_refused_with_its_special_tokens(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", None)
    with pytest.raises(ConfigError, match="special tokens are </s>: name the one .* with --end-of-document"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match="--end-of-document: has no token '<eos>'"):
        load_tokenizer(folder, "<eos>")


def test_no_tokenizer_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/?.*: no such file; name a tokenizer\.json"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer of the `tokenizers` library"):
        load_tokenizer(tmp_path)


def test_documents_are_stored_whole_though_the_file_asks_for_truncation(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"eos_token": "</s>"})
    (tmp_path / "text").mkdir()
    texts = [text(number) for number in range(30)]
    write_json_lines(tmp_path / "text" / "a.jsonl", texts)
    dataset = make(tmp_path / "text", tmp_path / "data", tokenizer=folder, held_out=0.0)
    assert sorted(documents(dataset)["train"]) == sorted(texts)
    assert dataset.manifest.tokenizer.vocab_size == 257
    assert Tokenizer.from_file(str(dataset.directory / dataset.manifest.tokenizer.file)).truncation is None


def test_text_that_spells_the_end_of_a_document_does_not_end_one(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    texts = [f"{number}: <|end|> is only text" for number in range(20)]
    write_json_lines(tmp_path / "text" / "a.jsonl", texts)
    assert sorted(documents(make(tmp_path / "text", tmp_path / "data", held_out=0.0))["train"]) == sorted(texts)


def test_a_vocabulary_with_gaps_needs_room_up_to_its_largest_id(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"eos_token": "</s>"})
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"]["far"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "text").mkdir()
    write_json_lines(tmp_path / "text" / "a.jsonl", ["one", "two"])
    dataset = make(tmp_path / "text", tmp_path / "data", tokenizer=folder, held_out=0.0)
    assert dataset.manifest.tokenizer.vocab_size == 70_001
    assert dataset.manifest.token_dtype == "uint32"
    assert sorted(documents(dataset)["train"]) == ["one", "two"]


def test_no_text_is_unknown_to_a_trained_tokenizer() -> None:
    tokenizer = train_tokenizer(["only plain letters"], 300).tokenizer
    for each in ("日本語 \x00\x7f\t  x\r\n", "🙂" * 3, "".join(map(chr, range(256)))):
        assert tokenizer.decode(tokenizer.encode(each).ids) == each


@pytest.mark.parametrize("kind", ["acgt", " "])
def test_a_word_without_end_is_trained_on_in_no_time(kind: str) -> None:
    started = time.monotonic()
    tokenizer = train_tokenizer([kind * (400_000 // len(kind)), "word word"], 300).tokenizer
    assert time.monotonic() - started < 10, "uncut it takes minutes"
    assert len(tokenizer.encode(kind * 100).ids) < 100
    assert tokenizer.encode("word").tokens == ["word"]


def test_a_tokenizer_that_stays_smaller_than_asked_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_json_lines(tmp_path / "text" / "a.jsonl", ["abab"] * 20)
    dataset = make(tmp_path / "text", tmp_path / "data", vocab=4000, held_out=0.0)
    assert 257 < dataset.manifest.tokenizer.vocab_size < 4000


def test_a_large_corpus_gives_a_sample_of_every_unit(tmp_path: Path) -> None:
    from jaxtrain.data.prepare import find_files
    from jaxtrain.data.prepare.runs import Rules, training_texts
    from jaxtrain.data.prepare.sources import plan_units

    for number in range(10):
        write_json_lines(tmp_path / f"{number}.jsonl", [f"file {number} " + "x" * 90] * 100)
    units = plan_units(find_files([str(tmp_path)]), "text", 10_000)
    sample = list(training_texts(units, Rules("text", False, 0.0, 0), most=20_000))
    assert 18_000 < sum(map(len, sample)) <= 20_000
    assert {each.split()[1] for each in sample} == {str(number) for number in range(10)}
    everything = list(training_texts(units, Rules("text", False, 0.0, 0), most=10**9))
    assert len(everything) == 1000
