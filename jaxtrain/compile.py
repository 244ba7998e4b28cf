"""`python -m jaxtrain.compile CONFIG [key=value …] --target h100 --devices 8`: the step compiled for GPUs, and read.

No GPU is needed, and nothing is trained: it shows what a device will hold and send, before one is rented.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxtrain.command import Parser, exit_code, leave
from jaxtrain.config import Config, parse_arguments
from jaxtrain.config.cluster import ClusterConfig, cluster_names, load_cluster
from jaxtrain.errors import refusing_os_errors
from jaxtrain.output import outlive_the_terminal

PROGRAM = "python -m jaxtrain.compile"
WIDTH = 150
"""Columns of the tables where no terminal says how many it has."""


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""

    def work() -> None:
        parsed, rest = _parser().parse_known_args(arguments)
        config = parse_arguments(PROGRAM, rest)
        _compile(config, load_cluster(parsed.target), parsed.devices, parsed.json, parsed.text)

    return exit_code(work)


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="%(prog)s CONFIG [KEY=VALUE ...] --target NAME --devices N [--json] [--text FILE]",
        description="Compile a config's train step for GPUs that aren't there; show its memory and collectives.",
        allow_abbrev=False,
    )
    names = ", ".join(cluster_names())
    parser.add_argument("--target", default="h100", help=f"{names}, or a YAML file that describes one (default: h100)")
    parser.add_argument("--devices", type=int, required=True, help="how many GPUs the mesh is over")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the compiled program's own text there too")
    return parser


def _compile(config: Config, cluster: ClusterConfig, devices: int, as_json: bool, text: Path | None) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # the devices to compile for are no platform of this machine
    from jaxtrain.planner import compile_for
    from jaxtrain.planner.tables import as_data, tables

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    with Console(stderr=True).status(f"compiling for {devices} × {cluster.gpu.name} …"):
        program = compile_for(config, cluster, devices)
    if text is not None:
        with refusing_os_errors(f"--text {text}", "name a file that can be written"):
            text.write_text(program.text, encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(as_data(program)) + "\n")
        return
    mesh = " × ".join(f"{axis}={size}" for axis, size in program.mesh.sizes.items() if size > 1)
    console.print(f"{devices} × {cluster.gpu.name}, {mesh or 'no mesh'}, compiled in {program.seconds:.1f} s\n")
    console.print(tables(program, cluster.gpu.memory))


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
