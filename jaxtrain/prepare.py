"""`python -m jaxtrain.prepare SOURCE… --output DIR`: text into a data set that can be trained on."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxtrain.command import Parser, exit_code, leave
from jaxtrain.data import Dataset, Recipe, Rules, console_progress, find_files, open_dataset, prepare
from jaxtrain.data.writer import SHARD_TOKENS
from jaxtrain.errors import ConfigError
from jaxtrain.output import outlive_the_terminal

VOCAB = 8192
HELD_OUT = 0.02
DESCRIPTION = """\
Turns text into a data set that can be trained on: tokenised, shuffled, split into train and held_out.

SOURCE is a file, a folder (everything below it) or a glob in quotes. The name tells what a file is: .jsonl, .ndjson and
.json are JSON Lines, one document a line; .parquet is Parquet, one document a row; everything else is plain text in
UTF-8, one document a file. All but Parquet may be compressed (.gz). Killed or interrupted, the same command goes on.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(
        lambda: _prepare(_parser().parse_args(arguments)), "interrupted; the same command goes on from here"
    )


def _prepare(parsed: argparse.Namespace) -> None:
    """Prepares or verifies a data set."""
    with console_progress() as report:
        if parsed.verify is not None:
            dataset = _verified(parsed)
            dataset.verify(report)
        else:
            recipe = _recipe(parsed)
            report("looking for files", 0, 0)
            dataset = prepare(parsed.output, find_files(parsed.sources, parsed.output), recipe, parsed.workers, report)
    Console(highlight=False).print(_summary(dataset), soft_wrap=True, markup=False)


def _parser() -> Parser:
    parser = Parser(
        "python -m jaxtrain.prepare", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    add("sources", nargs="*", metavar="SOURCE", help="what to read")
    add("--output", type=Path, metavar="DIR", help="where the data set will be (data.dir of a config)")
    add("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json, or a Hugging Face folder that holds one")
    add("--vocab", type=int, metavar="N", help=f"entries of a tokenizer that is trained on the text (default: {VOCAB})")
    add("--end-of-document", metavar="TOKEN", help="of --tokenizer (default: the eos_token that its folder tells)")
    add("--held-out", type=float, default=HELD_OUT, metavar="SHARE", help="of the documents (default: %(default)s)")
    add("--text-key", default="text", metavar="KEY", help="of JSON Lines, or column of Parquet (default: %(default)s)")
    add("--skip-invalid", action="store_true", help="pass over documents that can't be read, and count them")
    add("--seed", type=int, default=0, metavar="N", help="of the order of the documents (default: %(default)s)")
    add("--workers", type=int, default=cores, metavar="N", help="processes (default: one a core, %(default)s)")
    add("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="in a file, about (default: %(default)s)")
    add("--verify", type=Path, metavar="DIR", help="instead: read every file of a data set and compare its checksum")
    return parser


def _recipe(parsed: argparse.Namespace) -> Recipe:
    if not parsed.sources or parsed.output is None:
        raise ConfigError("name at least one SOURCE, and the data set with --output DIR; see --help")
    if parsed.tokenizer is not None and parsed.vocab is not None:
        raise ConfigError("--tokenizer names one that is there and --vocab trains one; give one of them")
    if parsed.tokenizer is None and parsed.end_of_document is not None:
        raise ConfigError("--end-of-document is a token of --tokenizer; a tokenizer that is trained has its own")
    if parsed.workers < 1 or parsed.shard_tokens < 1:
        raise ConfigError(f"--workers {parsed.workers}, --shard-tokens {parsed.shard_tokens}: both must be at least 1")
    rules = Rules(parsed.text_key, parsed.skip_invalid, parsed.held_out, parsed.seed)
    vocab = (parsed.vocab if parsed.vocab is not None else VOCAB) if parsed.tokenizer is None else None
    return Recipe(rules, vocab, parsed.tokenizer, parsed.end_of_document, shard_tokens=parsed.shard_tokens)


def _verified(parsed: argparse.Namespace) -> Dataset:
    if parsed.sources or parsed.output is not None:
        raise ConfigError("--verify takes the data set and nothing else")
    return open_dataset(parsed.verify)


def _summary(dataset: Dataset) -> str:
    manifest = dataset.manifest
    lines = [f"{dataset.directory}: complete, {sum(file.bytes for file in manifest.files()):,} bytes"]
    for name, split in manifest.splits.items():
        lines.append(
            f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens in {len(split.shards):,} shards"
        )
    lines.append(f"  tokenizer: {manifest.tokenizer.vocab_size:,} entries, so model.vocab must be at least that")
    left_out = {name: manifest.source.get(name, 0) for name in ("empty", "invalid")}
    if any(left_out.values()):
        lines.append(f"  left out: {left_out['empty']:,} empty and {left_out['invalid']:,} invalid documents")
    return "\n".join(lines)


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
