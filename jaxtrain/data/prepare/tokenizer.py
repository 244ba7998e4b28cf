"""The tokenizer of a data set: one that is there, or one trained on the text itself."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.data.manifest import TOKENIZER_FILE
from jaxtrain.data.writer import id_bound
from jaxtrain.errors import ConfigError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|end|>"
SMALLEST_VOCAB = 257
"""All 256 bytes and the end of a document."""
LARGEST_VOCAB = 1 << 20
"""The library allocates as many entries as are asked for, and ends the process where it can't."""
LONGEST_WORD = 1000
"""In characters. The library trains in time with the square of a word's length: many minutes for one of a megabyte."""

_LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")
TOLD_IN = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the token with which it ends a document."""

    tokenizer: "Tokenizer"
    end_of_document: str

    @property
    def end_id(self) -> int:
        """The id of the end of a document."""
        number = self.tokenizer.token_to_id(self.end_of_document)
        assert number is not None, "checked where it was loaded or trained"
        return int(number)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return id_bound(self.tokenizer)


def load_tokenizer(path: Path, end_of_document: str | None = None) -> LoadedTokenizer:
    """A `tokenizer.json`, or a Hugging Face folder that holds one.

    Without `end_of_document` it is the `eos_token` of the files beside it, or `<|end|>` where it has that. Truncation
    and padding, which such a file may ask for, are taken out: a document is stored whole.

    Raises:
        ConfigError: it can't be read, or no token ends a document.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    tokenizer = read_tokenizer(file)
    end = end_of_document or told_end(file.parent) or END_OF_DOCUMENT
    if tokenizer.token_to_id(end) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        known = f"its special tokens are {', '.join(special[:20])}" if special else "it has no special tokens"
        where = "--end-of-document" if end_of_document else "the end of a document"
        raise ConfigError(
            f"{file}: {where}: has no token {end!r}; {known}: name the one that ends a document with --end-of-document"
        )
    return LoadedTokenizer(tokenizer, end)


def train_tokenizer(texts: Iterable[str], vocab: int) -> LoadedTokenizer:
    """Byte-level BPE with at most `vocab` entries and the special token `<|end|>`; no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _cut_long_words(text)), trainer)
    return LoadedTokenizer(tokenizer, END_OF_DOCUMENT)


def _cut_long_words(text: str) -> Iterator[str]:
    """The text, cut within what has no space (or nothing but spaces) for longer than any word or indentation."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


def read_tokenizer(file: Path) -> "Tokenizer":
    """A `tokenizer.json`, without truncation and padding.

    Raises:
        ConfigError: it is missing, or no tokenizer.
    """
    from tokenizers import Tokenizer

    if not file.is_file():
        raise ConfigError(f"{file}: no such file; name a tokenizer.json or a folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{file}: not a tokenizer of the `tokenizers` library: {first_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def told_end(folder: Path) -> str | None:
    """The token that the files of a Hugging Face folder call `eos_token`."""
    for name in TOLD_IN:
        try:
            values: Any = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{folder / name}: can't be read: {first_line(error)}") from None
        token = values.get("eos_token") if isinstance(values, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return None
