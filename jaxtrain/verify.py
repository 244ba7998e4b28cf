"""`python -m jaxtrain.verify CONFIG [key=value …]`: does this config's mesh train as one device does?

The config is made small but keeps its structure and its mesh's kind, and is trained for a few steps on virtual CPU
devices. What it prints is a certificate. Neither the run's directory nor the data in files are touched.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.command import Parser, exit_code, leave
from jaxtrain.config import Config, parse_arguments
from jaxtrain.errors import ConfigError, UnequalError, refusing_os_errors
from jaxtrain.output import aligned, outlive_the_terminal

if TYPE_CHECKING:
    from jaxtrain.verification import Certificate, Check

PROGRAM = "python -m jaxtrain.verify"
ON_STDOUT = "-"


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""

    def work() -> None:
        options, rest = _parser().parse_known_args(arguments)
        _refuse_no_file(options.json)
        _verify(parse_arguments(PROGRAM, rest), options.json)

    return exit_code(work)


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="%(prog)s CONFIG [KEY=VALUE ...] [--json [FILE]]",
        description="Train a config's structure, made small, on one device and on its kind of mesh, of virtual CPU "
        "devices, and compare: initial parameters, losses, gradients, parameters after some steps.",
        epilog="Ends with 0 where they are equal, and with 7 where they are not.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", nargs="?", const=ON_STDOUT, metavar="FILE", help="print a JSON object, or write it to FILE"
    )
    return parser


def _refuse_no_file(file: str | None) -> None:
    """`--json` takes the next word as its file, which may have been meant as another argument."""
    if file is None or file == ON_STDOUT:
        return
    if file == "" or "=" in file or file.endswith((".yml", ".yaml")):
        raise ConfigError(f"--json {file}: is no name for a file of JSON; end the command with --json, or name a file")
    if not Path(file).parent.is_dir():
        raise ConfigError(f"--json {file}: there is no directory {Path(file).parent}; name a file that can be written")


def _verify(config: Config, file: str | None) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxtrain import runtime
    from jaxtrain.verification import device_count, verify

    count = device_count(config)
    runtime.configure(config.model_copy(update={"cpu_devices": count}))
    import jax

    devices = jax.devices()
    if len(devices) < count:
        raise ConfigError(
            f"verify needs {count} virtual CPU devices, but the environment makes {len(devices)}; "
            f"unset JAX_NUM_CPU_DEVICES, and xla_force_host_platform_device_count in XLA_FLAGS"
        )
    certificate = verify(config, devices, _tell)
    if file is not None and file != ON_STDOUT:
        with refusing_os_errors(f"--json {file}", "name a file that can be written"):
            Path(file).write_text(json.dumps(certificate.as_data()) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(certificate.as_data()) + "\n" if file == ON_STDOUT else _text(certificate))
    sys.stdout.flush()
    if certificate.failed:
        failed = ", ".join(check.what for check in certificate.failed)
        raise UnequalError(f"the mesh doesn't train as one device does: {failed}")


def _tell(text: str) -> None:
    sys.stderr.write(f"{text} …\n")
    sys.stderr.flush()


def _text(certificate: "Certificate") -> str:
    mesh = " × ".join(f"{axis} {size}" for axis, size in certificate.mesh.items()) or "one device"
    head = [
        ("mesh", f"{mesh} ({certificate.devices} virtual CPU devices), against one device in one pass"),
        ("precision", "float32, whatever the config says"),
        ("trained on", certificate.rows),
        *((name, choice) for name, choice in certificate.choices.items()),
        *(
            (f"made small: {section}" if section else "made small", ", ".join(changes))
            for section, changes in certificate.made_small.items()
        ),
    ]
    rows: list[tuple[str, ...]] = [("", "one device", "mesh", "difference", "allowed", "", "largest in")]
    rows += [_row(check) for check in certificate.checks]
    left_out = [
        f"  {check.what} leave out {', '.join(check.left_out)}: no gradient but rounding\n"
        for check in certificate.checks
        if check.left_out
    ]
    verdict = "PASSED" if certificate.passed else "FAILED"
    return f"{aligned(head)}\n{aligned(rows, right=(1, 2, 3, 4))}{''.join(left_out)}\n{verdict}\n"


def _row(check: "Check") -> tuple[str, ...]:
    numbers = ("" if number is None else f"{number:.7g}" for number in (check.one_device, check.mesh))
    difference = f"{check.difference:.1e}" if check.difference else "0"
    allowed = f"{check.tolerance:.0e}" if check.tolerance else "0"
    return check.what, *numbers, difference, allowed, "passed" if check.passed else "FAILED", check.where


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
