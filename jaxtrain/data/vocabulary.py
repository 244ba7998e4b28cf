"""Text to tokens and back, with the tokenizer of the data that a model was trained on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.data.manifest import TOKENIZER_FILE, has_manifest, parse_manifest
from jaxtrain.data.prepare.tokenizer import END_OF_DOCUMENT
from jaxtrain.errors import ConfigError, first_line
from jaxtrain.telemetry.jsonl import replace_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOLD_IN = "tokenizer_config.json"
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
    """The tokenizer of a prepared data set, or of a Hugging Face folder, or a `tokenizer.json`.

    A data set says which token ends a document, and so does the `eos_token` of a folder's `tokenizer_config.json`;
    otherwise it is `<|end|>`, where the tokenizer has that.

    Raises:
        ConfigError: there is none, or it can't be read.
        DataError: the data set's manifest is damaged.
    """
    from tokenizers import Tokenizer

    manifest = parse_manifest(path)[0] if has_manifest(path) else None
    file = path / (manifest.tokenizer.file if manifest else TOKENIZER_FILE) if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; name a tokenizer.json, or a folder or data set that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{file}: not a tokenizer of the `tokenizers` library: {first_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = manifest.tokenizer.end_of_document if manifest else _told_end(file.parent / TOLD_IN, tokenizer)
    return Vocabulary(tokenizer, end)


def keep_vocabulary(data_set: Path, folder: Path) -> None:
    """Copies the tokenizer of a prepared data set to `folder`, as a Hugging Face folder that needs nothing else.

    Raises:
        OSError: it can't be written.
    """
    vocabulary = open_vocabulary(data_set)
    end = None if vocabulary.end is None else vocabulary.tokenizer.id_to_token(vocabulary.end)
    replace_file(folder / TOKENIZER_FILE, vocabulary.tokenizer.to_str())
    replace_file(folder / TOLD_IN, json.dumps({"eos_token": end}, ensure_ascii=False, indent=2) + "\n")


def _told_end(file: Path, tokenizer: "Tokenizer") -> int | None:
    """The id of the token that a Hugging Face folder calls `eos_token`."""
    token: Any = END_OF_DOCUMENT
    if file.is_file():
        try:
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file}: can't be read: {first_line(error)}") from None
    return tokenizer.token_to_id(token) if isinstance(token, str) else None
