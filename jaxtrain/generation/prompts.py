"""Prompts from the command line or a file, as rows of tokens that the model can go on with."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.data.vocabulary import Vocabulary
from jaxtrain.errors import ConfigError

_SHOWN = 40
USUAL_TOKENS = 200
"""New tokens where nobody says how many."""


def read_prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    """The given texts, and after them those of `file`: one a line, in a `.jsonl` file as JSON strings.

    Raises:
        ConfigError: there are none, one is no text, or the file can't be read.
    """
    for text in texts:
        _refuse_no_text(text, "--prompt")
    prompts = list(texts)
    if file is not None:
        prompts += _lines(file)
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts FILE")
    return prompts


def _refuse_no_text(text: str, where: str) -> None:
    """JSON can spell half of a character, and Python reads bytes of the command line as such: no tokenizer knows it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = json.dumps(text[:_SHOWN])
        raise ConfigError(
            f"{where}: {shown} is not text in UTF-8: character {error.start + 1} is half of one"
        ) from None


def _lines(file: Path) -> list[str]:
    try:
        # Not `splitlines`, for which a form feed or U+2028, which may stand in a prompt, ends a line too.
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ConfigError(f"--prompts {file}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts {file}: is not text in UTF-8") from None
    if lines == [""]:
        return []
    if file.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(f'{file}, line {number}: is not a JSON string, such as "two\\nlines"')
        _refuse_no_text(prompt, f"{file}, line {number}")
        prompts.append(prompt)
    return prompts


def encode_prompts(texts: Sequence[str], vocabulary: Vocabulary, longest: int) -> list[list[int]]:
    """The tokens of each prompt, at least one and at most `longest`.

    Raises:
        ConfigError: a prompt is empty (no model is taught how a document begins), or too long.
    """
    prompts = [vocabulary.encode(text) for text in texts]
    for text, tokens in zip(texts, prompts, strict=True):
        shown = json.dumps(text if len(text) <= _SHOWN else text[:_SHOWN] + "…", ensure_ascii=False)
        if not tokens:
            raise ConfigError(
                f"the prompt {shown} is empty: the first token of a document is never predicted in training; "
                f"give at least one character to go on from"
            )
        if len(tokens) > longest:
            raise ConfigError(
                f"the prompt {shown} has {len(tokens)} tokens, but the model was trained on rows of {longest}; "
                f"shorten it, or try how it does beyond with data.sequence={len(tokens) + USUAL_TOKENS}"
            )
    return prompts


def room_for_tokens(asked: int | None, prompts: Sequence[Sequence[int]], longest: int) -> int:
    """How many tokens each prompt is continued with at most: those asked for, or 200, or as many as the rows have.

    The last one is never read, so it may stand behind a row of `longest` tokens.

    Raises:
        ConfigError: more are asked for than rows have room for.
    """
    prompt = max(map(len, prompts))
    room = longest + 1 - prompt
    if asked is not None and asked > room:
        raise ConfigError(
            f"--tokens {asked}: the longest prompt has {prompt} tokens and the model was trained on rows of "
            f"{longest}, which leaves room for {room}; ask for these, or try how it does beyond with "
            f"data.sequence={prompt + asked - 1}"
        )
    return min(USUAL_TOKENS, room) if asked is None else asked
