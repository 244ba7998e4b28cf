"""Text to tokens and back, with the tokenizer of the data that a model was trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.data.manifest import TOKENIZER_FILE, has_manifest, parse_manifest
from jaxtrain.data.prepare.tokenizer import END_OF_DOCUMENT, TOLD_IN, read_tokenizer, told_end
from jaxtrain.files import replace_file, replace_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the id that ends a document (None: there is none)."""

    tokenizer: "Tokenizer"
    end: int | None

    @property
    def entries(self) -> int:
        """The largest id plus one."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that begins a document, as `prepare` makes them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def continuation(self, prompt: Sequence[int], tokens: Sequence[int], *, whole: bool = True) -> str:
        """The text that `tokens` add to that of `prompt`.

        Args:
            whole: false leaves out the end where it may be the first bytes of a letter that later tokens complete.
        """
        # Decoded together: some tokenizers begin every text with a space, or without the one that it has.
        before, after = self._decode(prompt), self._decode([*prompt, *tokens])
        text = after.removeprefix(before) if after.startswith(before) else self._decode(tokens)
        return text if whole else text.rstrip(_INCOMPLETE)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def open_vocabulary(path: Path) -> Vocabulary:
    """The tokenizer of a prepared data set, or a `tokenizer.json`, or a Hugging Face folder that holds one.

    A data set says which token ends a document; elsewhere it is found as `prepare` does, and may be none.

    Raises:
        ConfigError: there is none, or it can't be read.
        DataError: the data set's manifest is damaged.
    """
    if has_manifest(path):
        record = parse_manifest(path)[0].tokenizer
        return Vocabulary(read_tokenizer(path / record.file), record.end_of_document)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    tokenizer = read_tokenizer(file)
    return Vocabulary(tokenizer, tokenizer.token_to_id(told_end(file.parent) or END_OF_DOCUMENT))


def keep_vocabulary(data_set: Path, folder: Path) -> None:
    """Copies the tokenizer of a prepared data set to `folder`, as a Hugging Face folder that needs nothing else.

    Raises:
        OSError: it can't be written.
    """
    vocabulary = open_vocabulary(data_set)
    replace_file(folder / TOKENIZER_FILE, vocabulary.tokenizer.to_str())
    if vocabulary.end is not None:
        end = vocabulary.tokenizer.id_to_token(vocabulary.end)
        replace_json(folder / TOLD_IN[0], {"eos_token": end})
