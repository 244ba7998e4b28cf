"""The command line that all verbs share: one configuration file, overrides, and whether only to print the result."""

import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from jaxtrain.config.load import dump, load
from jaxtrain.config.nearest import nearest_text
from jaxtrain.config.schema import Config
from jaxtrain.config.source import OVERRIDE
from jaxtrain.errors import ConfigError, Shown

USAGE = """\
usage: {program} CONFIG [KEY=VALUE ...] [--print-config]
       {program} --config CONFIG [KEY=VALUE ...] [--print-config]

  CONFIG          YAML file that describes the run; see configs/README.md
  KEY=VALUE       sets one key over the file, the value written as in YAML; --KEY=VALUE is the same
  --print-config  print every key with its value, and stop
  --help          print this, and stop

example: {program} configs/quickstart.yml steps=100 optimizer.learning_rate=1e-3 mesh.fsdp=4
"""
OPTIONS = ["--config", "--print-config", "--help"]


def parse_arguments(program: str, argv: Sequence[str]) -> Config:
    """Read a verb's command line, without the program name, and load the configuration that it names.

    Raises:
        ConfigError: a wrong command line or configuration.
        Shown: `--help` has printed the usage, or `--print-config` the configuration.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(USAGE.format(program=program))
        raise Shown(0)
    files: list[str] = []
    overrides: list[str] = []
    print_config = False
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--print-config":
            print_config = True
        elif argument == "--config" or argument.startswith("--config="):
            files.append(_file(argument, arguments))
        elif OVERRIDE.fullmatch(argument):
            overrides.append(argument)
        elif argument.startswith("-"):
            _refuse_option(program, argument)
        else:
            files.append(argument)
    if len(files) != 1:
        _refuse_files(program, files)
    config = load(files[0], overrides)
    if print_config:
        sys.stdout.write(dump(config))
        raise Shown(0)
    return config


def _file(argument: str, rest: Iterator[str]) -> str:
    name, given, value = argument.partition("=")
    file = value if given else next(rest, "")
    if not file or file.startswith("-"):
        raise ConfigError(f"{name} needs a file after it, such as --config configs/quickstart.yml")
    return file


def _refuse_option(program: str, argument: str) -> NoReturn:
    close = nearest_text(argument, OPTIONS)
    hint = f"did you mean {close}?" if close else f"options are {', '.join(OPTIONS)}"
    if re.fullmatch(r"--[\w.-]+", argument) and not close:
        hint += f"; a key is set with its value in one word: {argument}=VALUE"
    raise ConfigError(f"{program}: unknown option {argument}; {hint}")


def _refuse_files(program: str, files: Sequence[str]) -> NoReturn:
    if not files:
        raise ConfigError(f"{program}: no configuration file; try {program} configs/quickstart.yml, or --help")
    raise ConfigError(
        f"{program}: one configuration file is needed, but {' and '.join(files)} were given; overrides are key=value"
    )
