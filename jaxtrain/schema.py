"""`python -m jaxtrain.schema [--output FILE]`: the JSON schema of configuration files, for editors."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.config import json_schema
from jaxtrain.errors import EXIT_COMPLETE, ConfigError

USAGE = "usage: python -m jaxtrain.schema [--output FILE]\n\nPrints the JSON schema of configuration files.\n"


def main(argv: Sequence[str]) -> int:
    """Print the schema, or write it to a file; returns the exit code."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    try:
        match list(argv):
            case []:
                sys.stdout.write(text)
            case ["-h"] | ["--help"]:
                sys.stdout.write(USAGE)
            case ["--output", file]:
                _write(Path(file), text)
            case _:
                raise ConfigError(f"python -m jaxtrain.schema takes --output FILE or nothing, not {' '.join(argv)}")
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return EXIT_COMPLETE


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
