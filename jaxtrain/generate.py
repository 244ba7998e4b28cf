"""`python -m jaxtrain.generate RUN[@STEP] --prompt TEXT`: text that a trained language model goes on with."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.command import Parser, exit_code, join, leave
from jaxtrain.errors import ConfigError
from jaxtrain.output import outlive_the_terminal, write_once

if TYPE_CHECKING:
    from jaxtrain.config import Config
    from jaxtrain.data.vocabulary import Vocabulary
    from jaxtrain.generation import Generator, Sampling
    from jaxtrain.models.task import Generative, Task

STREAMED_AT_ONCE = 4
"""Tokens between two looks at what there is; each look costs a moment."""


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(lambda: _generate(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python -m jaxtrain.generate",
        description="Goes on with prompts, from the parameters of a checkpoint and on any mesh.",
        epilog="example: python -m jaxtrain.generate runs/quickstart --prompt 'def ' --temperature 0.8",
    )
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="a run directory; its newest checkpoint, or that of STEP")
    add("overrides", metavar="KEY=VALUE", nargs="*", help="keys of the run's config; mesh.* begin with their defaults")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line; in a .jsonl file, a JSON string a line")
    add("--tokens", type=int, metavar="N", help="at most so many new tokens (default 200, or what a row has room for)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token (default 1)")
    add("--top-k", type=int, metavar="K", help="draw only among the K likeliest tokens")
    add(
        "--top-p", type=float, metavar="P", help="draw only among the likeliest tokens that have probability P together"
    )
    add("--seed", type=int, default=0, metavar="S", help="another one draws other tokens (default 0)")
    add("--batch", type=int, default=32, metavar="N", help="prompts at a time (default 32)")
    add("--ema", action="store_true", help="use the moving average of the parameters")
    add("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json or a data set, if the run's data set is gone")
    add("--json", action="store_true", help="print a JSON object a line")
    parsed = parser.parse_intermixed_args(list(arguments))
    _check(parsed)
    return parsed


def _check(options: Namespace) -> None:
    """Raises ConfigError for a value out of its range."""
    limits = [
        ("--tokens", options.tokens is None or options.tokens >= 1, "at least 1"),
        ("--temperature", 0 <= options.temperature <= 1e38, "from 0 to 1e38"),
        ("--top-k", options.top_k is None or 1 <= options.top_k < 2**31, "at least 1"),
        ("--top-p", options.top_p is None or 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("--seed", 0 <= options.seed < 2**32, f"from 0 to {2**32 - 1}"),
        ("--batch", options.batch >= 1, "at least 1"),
    ]
    for name, right, wanted in limits:
        if not right:
            raise ConfigError(f"{name} must be {wanted}, not {getattr(options, name[2:].replace('-', '_'))}")


def _generate(options: Namespace) -> None:
    from jaxtrain.generation import Generator, encode_prompts, read_prompts, room_for_tokens
    from jaxtrain.inference import inference_program
    from jaxtrain.saved_run import agree_on_request, config_of, find_checkpoint
    from jaxtrain.weights import restore_weights

    texts = read_prompts(options.prompt, options.prompts)
    saved = find_checkpoint(options.run)
    config = config_of(saved, options.overrides)
    devices = join(config)
    agree_on_request(options.run, [saved], config, {**vars(options), "prompts": texts})
    program = inference_program(config, devices, rows=1)
    task = _generative(program.task)
    vocabulary = _vocabulary(options, saved.directory.parent, config)
    if vocabulary.entries > task.vocab:
        raise ConfigError(f"the tokenizer has {vocabulary.entries} entries, the model only rows for {task.vocab}")
    prompts = encode_prompts(texts, vocabulary, task.sequence)
    most = room_for_tokens(options.tokens, prompts, task.sequence)
    params = restore_weights(saved, program, "ema" if options.ema else "params")
    sampling = _sampling(options)
    generator = Generator(program, params, vocabulary.entries, vocabulary.end, sampling, most, options.seed)
    if len(prompts) == 1 and not options.json:
        _write_growing(generator, vocabulary, texts[0], prompts[0])
        return
    for start in range(0, len(prompts), options.batch):
        found = generator(prompts[start : start + options.batch])
        for number, continuation in enumerate(found, start):
            text = vocabulary.continuation(prompts[number], continuation.tokens)
            if options.json:
                ended = {"tokens": continuation.tokens, "ended": continuation.ended}
                write_once(json.dumps({"prompt": texts[number], "text": text, **ended}, ensure_ascii=False) + "\n")
            else:
                write_once(f"--- {number + 1} of {len(prompts)}\n{texts[number]}{text}\n")


def _write_growing(generator: "Generator", vocabulary: "Vocabulary", text: str, prompt: list[int]) -> None:
    """The prompt and what follows it, as soon as it is there."""
    write_once(text)
    shown = ""
    for (continuation,) in generator.stream([prompt], STREAMED_AT_ONCE):
        shown = _write_more(vocabulary.continuation(prompt, continuation.tokens, whole=False), shown)
    _write_more(vocabulary.continuation(prompt, continuation.tokens), shown)
    write_once("\n")


def _write_more(text: str, shown: str) -> str:
    write_once(text.removeprefix(shown))
    return text


def _vocabulary(options: Namespace, run: Path, config: "Config") -> "Vocabulary":
    """The tokenizer asked for, or the run's own copy, or that of its data."""
    from jaxtrain.config import TokenRowsConfig
    from jaxtrain.data.vocabulary import open_vocabulary
    from jaxtrain.run_directory import RunDirectory
    from jaxtrain.saved_run import split_step
    from jaxtrain.token_data import directories

    if options.tokenizer is not None:
        return open_vocabulary(options.tokenizer)
    for path in (split_step(options.run)[0], run):
        if (kept := RunDirectory(path).tokenizer).is_dir():
            return open_vocabulary(kept)
    if not isinstance(config.data, TokenRowsConfig):
        raise ConfigError(f"data.kind={config.data.kind} has no tokenizer that is known here; give --tokenizer PATH")
    try:
        return open_vocabulary(directories(config.data)[0])
    except ConfigError as error:
        raise ConfigError(
            f"the tokenizer of the run is neither with it nor with its data ({error}); "
            f"give --tokenizer PATH, or data.dir=DIR where the data are now"
        ) from None


def _generative(task: "Task") -> "Generative":
    from jaxtrain.models.task import Generative

    if not isinstance(task, Generative):
        raise ConfigError(f"{type(task).__name__} can't go on with text: it has no prefill and decode")
    return task


def _sampling(options: Namespace) -> "Sampling":
    from jaxtrain.generation import Sampling

    if options.temperature == 0:
        return Sampling()
    top_p = None if options.top_p == 1 else options.top_p
    return Sampling(options.temperature, options.top_k, top_p)


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
