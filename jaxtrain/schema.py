"""`python -m jaxtrain.schema [--output FILE]`: the JSON schema of configuration files, for editors."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.command import Parser, exit_code, leave
from jaxtrain.config import json_schema
from jaxtrain.errors import refusing_os_errors
from jaxtrain.output import outlive_the_terminal


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(lambda: _show(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = Parser("python -m jaxtrain.schema", description="Prints the JSON schema of configuration files.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead")
    return parser.parse_args(arguments)


def _show(options: Namespace) -> None:
    text = json.dumps(json_schema(), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
        return
    with refusing_os_errors(f"--output {options.output}", "name a file that can be written"):
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
