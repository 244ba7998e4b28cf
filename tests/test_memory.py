"""What restoring needs: a resumed start hardly more than a cold one, a reader of parameters hardly more than these."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.runs import checkpoint_steps, events, start, step_losses, write_tiny

pytestmark = pytest.mark.slow

MODEL = "model: {vocab: 256, layers: 7, embed: 768, heads: 12, kv_heads: 12, mlp: 2560, head_dim: 64}\n"
PARAMETERS = 58_207_488


MEASURED = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, *sys.argv[1:]])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""
"""A process counts the peak of the one that it was forked from as its own: this one, between it and us, is small."""


def peak_bytes(
    arguments: list[str],
    log: Path,
    program: Sequence[str] = ("-m", "tests.faults"),
    devices: int = 1,
    ends: tuple[int, str] = (1, "injected at step"),
) -> int:
    """The peak resident memory of a process, by default a training that dies at a step, before it saves."""
    with log.open("w") as output:
        process = start(arguments, devices, ("-c", MEASURED, *program), optimised=True)
        output.write(process.stdout.read())  # type: ignore[union-attr]
    assert process.wait() == ends[0], log.read_text()
    assert ends[1] in log.read_text()
    return int(log.read_text().splitlines()[-1].removeprefix("peak ")) * 1024


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """The config of a model of 58 million parameters, whose run died at step 2 with step 1 saved, in `resumed`."""
    folder = tmp_path_factory.mktemp("memory")
    path = write_tiny(folder, tiny_data)
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("model", "run_dir", "checkpoint:"))]
    path.write_text("\n".join(lines) + "\n" + MODEL)
    peak_bytes(
        ["raise=RuntimeError@2", str(path), f"run_dir={folder / 'resumed'}", "checkpoint.every=1"], folder / "first.log"
    )
    assert checkpoint_steps(folder / "resumed") == [1]
    return path


@pytest.mark.parametrize(
    ("devices", "overrides"), [(1, []), (8, ["mesh.fsdp=8"]), (8, ["mesh.fsdp=2", "mesh.tensor=4"])]
)
def test_restoring_parameters_needs_no_room_for_the_optimizer_nor_for_copies(
    devices: int, overrides: list[str], config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(config_file.parent / "resumed"), "global_batch=8", *overrides]
    program = ("-m", "tests.restore_parameters")
    ends = (0, f"{PARAMETERS} parameters of step 1 on {devices} devices")
    peak = peak_bytes(arguments, tmp_path / "log", program, devices, ends)
    with capsys.disabled():
        sys.stdout.write(f"\nparameters alone on {devices} devices {overrides}: {peak / 2**30:.2f} GiB\n")
    assert 4 * PARAMETERS < peak < 1.5e9


def test_a_resumed_start_peaks_at_most_a_third_above_a_cold_one(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_file.parent

    def arguments(fault: str, name: str, every: int) -> list[str]:
        return [fault, str(config_file), f"run_dir={folder / name}", f"checkpoint.every={every}"]

    cold = peak_bytes(arguments("raise=RuntimeError@3", "cold", 0), tmp_path / "cold.log")
    resumed = peak_bytes(arguments("raise=RuntimeError@4", "resumed", 0), tmp_path / "resumed.log")
    assert f"{PARAMETERS:,} parameters" in (tmp_path / "cold.log").read_text()
    assert [event["step"] for event in events(folder / "resumed", "start")] == [0, 1]
    assert sorted(step_losses(folder / "resumed")) == [1, 2, 3]
    with capsys.disabled():
        sys.stdout.write(f"\npeak memory: cold {cold / 2**30:.2f} GiB, resumed {resumed / 2**30:.2f} GiB\n")
    assert cold > 12 * PARAMETERS, "parameters and moments alone are more than what was measured"
    assert resumed <= 1.3 * cold, f"cold {cold / 2**30:.2f} GiB, resumed {resumed / 2**30:.2f} GiB"
