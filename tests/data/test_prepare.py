import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxtrain.data import Dataset, Text, TextSource, ensure_text_dataset, open_dataset
from jaxtrain.data.prepare import split_documents, train_tokenizer
from jaxtrain.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [Text(f"{number}.txt", f"document {number} says {number * number} Grüße 🙂\n" * 20) for number in range(60)]
SOURCE = TextSource("numbers", {"made": "by a test"}, lambda: TEXTS)

# A program that prepares the data set in its first argument; it names each thing it does, and after what its second
# argument says waits for a line.
PREPARE = """
import sys
from jaxtrain.data import TextSource, ensure_text_dataset
from tests.data.test_prepare import TEXTS

def report(what, done, total):
    line = what.split(" that ")[0]
    print(line, flush=True)
    if line == sys.argv[2]:
        sys.stdin.readline()

dataset = ensure_text_dataset(sys.argv[1], TextSource("numbers", {}, lambda: TEXTS), 300, 0.2, report)
print(dataset.manifest_hash, flush=True)
"""


def prepare(directory: Path, vocab: int = 300, held_out: float = 0.2, source: TextSource = SOURCE) -> Dataset:
    return ensure_text_dataset(directory, source, vocab, held_out)


def start(directory: Path, stop_after: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(directory), stop_after],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_until(process: "subprocess.Popen[str]", line: str) -> list[str]:
    assert process.stdout is not None
    seen: list[str] = []
    while line not in seen:
        read = process.stdout.readline()
        assert read, f"ended before {line!r}: {seen}"
        seen.append(read.strip())
    return seen


def test_every_text_is_in_one_split_in_full_and_ends(tmp_path: Path) -> None:
    dataset = prepare(tmp_path / "data")
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_file))
    end = dataset.manifest.tokenizer.end_of_document
    assert end == tokenizer.token_to_id("<|end|>")
    texts = {}
    for split, record in dataset.manifest.splits.items():
        for number in range(record.documents):
            tokens = dataset.read(split, number).tolist()
            assert tokens[-1] == end
            assert end not in tokens[:-1]
            texts[tokenizer.decode(tokens[:-1])] = split
    assert sorted(texts) == sorted(text.content for text in TEXTS)
    expected = split_documents(TEXTS, 0.2)
    assert {content for content, split in texts.items() if split == "held_out"} == {
        text.content for text in expected["held_out"]
    }


def test_two_preparations_are_equal_to_the_byte(tmp_path: Path) -> None:
    assert prepare(tmp_path / "a").manifest_hash == prepare(tmp_path / "b").manifest_hash


def test_a_prepared_data_set_is_opened_without_reading_its_source(tmp_path: Path) -> None:
    def unreadable() -> list[Text]:
        raise AssertionError("the source was read")

    first = prepare(tmp_path / "data")
    again = prepare(tmp_path / "data", source=TextSource("numbers", {"made": "elsewhere"}, unreadable))
    assert again.manifest_hash == first.manifest_hash


def test_a_prepared_data_set_is_opened_without_a_lock_so_it_may_be_read_only(tmp_path: Path) -> None:
    prepare(tmp_path / "data")
    (tmp_path / "data.lock").unlink()
    prepare(tmp_path / "data")
    assert not (tmp_path / "data.lock").exists()


@pytest.mark.parametrize(
    ("vocab", "held_out", "name", "words"),
    [
        (301, 0.2, "numbers", r"data\.vocab: 301, but the data set in .*data was made with 300"),
        (300, 0.3, "numbers", r"data\.held_out: 0\.3, but the data set in .*data was made with 0\.2"),
        (300, 0.2, "letters", r"data\.source: letters, but the data set in .*data was made with numbers"),
    ],
)
def test_a_data_set_made_with_other_settings_is_refused(
    tmp_path: Path, vocab: int, held_out: float, name: str, words: str
) -> None:
    before = prepare(tmp_path / "data").manifest_hash
    with pytest.raises(ConfigError, match=words + r".*choose another data\.dir or delete this one"):
        prepare(tmp_path / "data", vocab, held_out, TextSource(name, {}, lambda: TEXTS))
    assert open_dataset(tmp_path / "data").manifest_hash == before


def test_settings_that_make_no_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.vocab: 256 is too small"):
        prepare(tmp_path / "data", vocab=256)
    for share in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=rf"data\.held_out: {share} is no share"):
            prepare(tmp_path / "data", held_out=share)
    with pytest.raises(ConfigError, match=r"data\.held_out: 1e-09 leaves held_out without a document"):
        prepare(tmp_path / "data", held_out=1e-9)
    assert not (tmp_path / "data").exists()


def test_nothing_need_be_held_out(tmp_path: Path) -> None:
    splits = prepare(tmp_path / "data", held_out=0).manifest.splits
    assert (splits["train"].documents, splits["held_out"].documents) == (60, 0)


def test_a_document_is_held_out_by_its_name_alone() -> None:
    few, all_ = split_documents(TEXTS[:30], 0.3), split_documents(TEXTS, 0.3)
    assert {text.name for text in few["held_out"]} == {text.name for text in all_["held_out"]} & {
        text.name for text in TEXTS[:30]
    }
    more = split_documents(TEXTS, 0.5)
    assert {text.name for text in all_["held_out"]} < {text.name for text in more["held_out"]}


def test_documents_are_shuffled_and_always_alike() -> None:
    names = [text.name for text in split_documents(TEXTS, 0.3)["train"]]
    assert names == [text.name for text in split_documents(TEXTS, 0.3)["train"]]
    kept = set(names)
    assert names != [text.name for text in TEXTS if text.name in kept]


def test_no_text_is_unknown_to_the_tokenizer() -> None:
    tokenizer = train_tokenizer(["only plain letters"], 300)
    for text in ("日本語 \x00\x7f\t  x\r\n", "🙂" * 3, "".join(map(chr, range(256)))):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_tokenizer_that_stays_smaller_than_asked_is_accepted(tmp_path: Path) -> None:
    source = TextSource("short", {}, lambda: [Text(str(number), "abab") for number in range(20)])
    dataset = prepare(tmp_path / "data", vocab=4000, source=source)
    assert 257 < dataset.manifest.tokenizer.vocab_size < 4000
    assert prepare(tmp_path / "data", vocab=4000, source=source).manifest_hash == dataset.manifest_hash


def test_a_damaged_data_set_is_not_prepared_over(tmp_path: Path) -> None:
    prepare(tmp_path / "data")
    (tmp_path / "data" / "train-lengths.npy").unlink()
    with pytest.raises(DataError, match=r"train-lengths.npy: missing"):
        prepare(tmp_path / "data")


def test_a_killed_preparation_is_never_used_and_the_next_one_starts_afresh(tmp_path: Path) -> None:
    process = start(tmp_path / "data", stop_after="writing documents")
    read_until(process, "writing documents")
    process.kill()
    process.communicate()
    assert not (tmp_path / "data").exists()
    assert list((tmp_path / "data.partial").iterdir())
    prepare(tmp_path / "data").verify()
    assert not (tmp_path / "data.partial").exists()


def test_two_processes_at_once_make_one_data_set(tmp_path: Path) -> None:
    first = start(tmp_path / "data", stop_after="reading documents")
    read_until(first, "reading documents")
    second = start(tmp_path / "data")
    read_until(second, "waiting for the process")
    result = first.communicate("go on\n")[0].split()[-1]
    rest = second.communicate()[0].split()
    assert (first.returncode, second.returncode) == (0, 0)
    assert rest == [result]  # not a word of preparing
    assert open_dataset(tmp_path / "data").manifest_hash == result


def test_rows_of_tokens_are_stored_in_two_bytes(tmp_path: Path) -> None:
    assert prepare(tmp_path / "data").read("train", 0).dtype == np.uint16
