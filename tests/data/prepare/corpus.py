"""A small corpus in every format, and a program that prepares it and can be stopped at any of its steps."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from jaxtrain.data import Dataset, Recipe, Rules, find_files, prepare

ROOT = Path(__file__).resolve().parents[3]
UNIT_BYTES = 4000
"""Gives the corpus eight units or more."""

KILLED = -signal.SIGKILL

# Prepares its first argument into its second with so many processes, and dies at once at a report: "STAGE#NUMBER".
PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.data.prepare.corpus import make

seen = []

def report(what, done, total):
    seen.append(what)
    if f"{what}#{seen.count(what)}" == sys.argv[4]:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    print(make(Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3]), report=report).manifest_hash)
"""


def text(number: int) -> str:
    return f"document {number} says {number * number} Grüße 🙂\n" * (3 + number % 17)


def write_corpus(folder: Path) -> list[str]:
    """Files of four kinds in nested folders; returns all documents."""
    (folder / "deep").mkdir(parents=True)
    texts = [text(number) for number in range(100)]
    for number in range(20):
        (folder / "deep" / f"{number}.txt").write_text(texts[number])
    write_json_lines(folder / "lines.jsonl", texts[20:50])
    with gzip.open(folder / "deep" / "lines.json.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in texts[50:70])
    pq.write_table(pa.table({"id": list(range(30)), "text": texts[70:]}), folder / "table.parquet", row_group_size=7)
    return texts


def write_json_lines(path: Path, texts: Sequence[str], key: str = "text") -> None:
    path.write_text("".join(json.dumps({"id": n, key: each}) + "\n" for n, each in enumerate(texts)))


def recipe(**changes: Any) -> Recipe:
    """A tokenizer of 300 entries, a fifth held out, and several shards; `changes` are of the recipe or its rules."""
    rules = {"text_key": "text", "skip_invalid": False, "held_out": 0.2, "seed": 0}
    rules |= {key: changes.pop(key) for key in list(changes) if key in rules}
    if "tokenizer" not in changes:
        changes.setdefault("vocab", 300)
    return Recipe(Rules(**rules), **{"shard_tokens": 4000, **changes})


def make(source: Path, directory: Path, workers: int = 1, report: Any = None, **changes: Any) -> Dataset:
    unit_bytes = changes.pop("unit_bytes", UNIT_BYTES)
    return prepare(directory, find_files([str(source)]), recipe(**changes), workers, report, unit_bytes)


def run(source: Path, directory: Path, workers: int = 1, die_at: str = "") -> "subprocess.CompletedProcess[str]":
    """The preparation in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, str(source), str(directory), str(workers), die_at]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def verb(*arguments: str | Path, within: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    """`python -m jaxtrain.prepare` as a real process, perhaps started by another program."""
    command = [*within, sys.executable, "-m", "jaxtrain.prepare", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def documents(dataset: Dataset) -> Mapping[str, list[str]]:
    """The texts of each split in their stored order, without what ends them."""
    tokenizer = Tokenizer.from_file(str(dataset.directory / dataset.manifest.tokenizer.file))
    end = dataset.manifest.tokenizer.end_of_document
    found: dict[str, list[str]] = {}
    for split, record in dataset.manifest.splits.items():
        found[split] = []
        for number in range(record.documents):
            tokens = dataset.read(split, number).tolist()
            assert tokens[-1] == end
            assert end not in tokens[:-1]
            found[split].append(tokenizer.decode(tokens[:-1], skip_special_tokens=False))
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
