"""`python -m jaxtrain.evaluate RUN[@STEP|@all]`: the loss of a trained model on held-out rows and other data."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain.command import Parser, exit_code, join, leave
from jaxtrain.errors import ConfigError
from jaxtrain.output import aligned, outlive_the_terminal, write_once
from jaxtrain.telemetry.jsonl import encode

if TYPE_CHECKING:
    from jaxtrain.inference import Evaluated


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(lambda: _evaluate(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python -m jaxtrain.evaluate",
        description="Evaluates the parameters of checkpoints, exactly and on any mesh: each row once, weights counted.",
        epilog="example: python -m jaxtrain.evaluate runs/quickstart@all --set wiki=data/wiki",
    )
    add = parser.add_argument
    add("run", metavar="RUN[@STEP|@all]", help="a run directory; its newest checkpoint, that of STEP, or each")
    add("overrides", metavar="KEY=VALUE", nargs="*", help="keys of the run's config; mesh.* begin with their defaults")
    add("--set", action="append", default=[], metavar="NAME=DIR", dest="sets", help="evaluate on this data set too")
    add("--ema", action="store_true", help="use the moving average of the parameters")
    add("--json", action="store_true", help="print a JSON object a line")
    parsed = parser.parse_intermixed_args(list(arguments))
    for text in parsed.sets:
        name, given, directory = text.partition("=")
        if not (name and given and directory):
            raise ConfigError(f"--set {text}: must be NAME=DIR, such as wiki=data/wiki")
        parsed.overrides.append(f"eval.sets.{name}={json.dumps(directory)}")
    return parsed


def _evaluate(options: Namespace) -> None:
    from jaxtrain.inference import evaluate_checkpoints
    from jaxtrain.saved_run import agree_on_request, config_of, find_checkpoints

    checkpoints = find_checkpoints(options.run)
    config = config_of(checkpoints[-1], options.overrides)
    devices = join(config)
    agree_on_request(options.run, checkpoints, config, vars(options))
    results = []
    for result in evaluate_checkpoints(checkpoints, config, devices, ema=options.ema, warn=_warn):
        results.append(result)
        if options.json:
            write_once(_line(result))
    if not options.json:
        write_once(_table(results))


def _warn(text: str) -> None:
    write_once(f"warning: {text}\n", sys.stderr)


def _line(result: "Evaluated") -> str:
    """A strict JSON object; a number that isn't finite is written as in metrics.jsonl."""
    return encode(
        {"step": result.step, "set": result.set, "rows": result.rows, "weight": result.weight, **result.metrics}
    )


def _table(results: "Sequence[Evaluated]") -> str:
    names = list(results[0].metrics)
    rows = [("step", "set", "rows", "weight", *names)]
    for result in results:
        weight = "" if result.weight is None else f"{result.weight:,.0f}"
        values = [f"{result.metrics[name]:.4f}" for name in names]
        rows.append((f"{result.step}", result.set, f"{result.rows:,}", weight, *values))
    return aligned(rows, right={0, *range(2, len(rows[0]))})


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
