"""Files of one JSON object a line: strict JSON, flushed line by line, read through what a crash leaves behind."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

NON_FINITE = "non_finite"
Decode = Callable[[str], dict[str, Any] | None]

logger = logging.getLogger(__name__)


def encode(record: Mapping[str, Any]) -> str:
    """One line of strict JSON, with its newline. Array scalars become numbers.

    JSON has no NaN and no infinity: such a value is written as null, and named once more under `non_finite`:
    `{"step": 5, "loss": null, "non_finite": {"loss": "nan"}}`. `read` puts it back.
    """
    plain = {key: _plain(value) for key, value in record.items()}
    non_finite = {key: str(value) for key, value in plain.items() if _is_non_finite(value)}
    if non_finite:
        plain = {key: None if key in non_finite else value for key, value in plain.items()} | {NON_FINITE: non_finite}
    return json.dumps(plain, allow_nan=False) + "\n"


def read(path: Path, decode: Decode | None = None) -> list[dict[str, Any]]:
    """The records of a file, as they were given to `encode`.

    A last line that a crash tore is passed over; any other that is no JSON object too, with a warning.

    Args:
        decode: what makes a record of a line, or None where the line is none of a file of this sort.
    """
    return [record for record, _ in read_with_lines(path, decode)]


def read_with_lines(path: Path, decode: Decode | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each record with the line that it came from."""
    decode = decode or decode_line
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            record = decode(line)
            if record is not None:
                yield record, line
            elif line.endswith("\n"):  # without a newline it is the last line, torn by a crash
                logger.warning(
                    "%s, line %d is not a JSON object of this sort of file and is passed over: %.60r",
                    path,
                    number,
                    line,
                )


def lines_below(path: Path, key: str, bound: int) -> str:
    """The lines whose number at `key` is below `bound`: those that a resumed run won't write again.

    A line without such a number is none of ours and is passed over.
    """
    numbered = [(record.get(key), line) for record, line in read_with_lines(path)]
    return "".join(line for number, line in numbered if isinstance(number, int) and number < bound)


def decode_line(line: str) -> dict[str, Any] | None:
    """The record of a whole line, as it was given to `encode`; None: it is none."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return None
        return record | {key: float(value) for key, value in record.pop(NON_FINITE, {}).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
