"""How steady health probes are on this machine, how often a rank is falsely named, and how soon a slow one is.

Two processes on a core each probe as in a run. At the end another process takes a share of the second one's core, so
that it is slower by 30 %. Prints one JSON line: the probe's milliseconds, its scatter, false alarms among the
undisturbed probes, and after how many more the slow rank was named. On a machine that others use too, run it as
`chrt -r 10 scripts/measure_probes`, which needs root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxtrain.config import HealthConfig
from jaxtrain.resilience.judge import KEPT_PROBES
from jaxtrain.resilience.stragglers import scores

PERIOD, SHARE = 0.004, 0.23
PAUSE = 0.04
DISTURBED = 60


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Steadiness of health probes.")
    parser.add_argument("--probes", type=int, default=2000, help="undisturbed ones")
    parser.add_argument("--as", dest="role", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        role, core, file = arguments.role
        os.sched_setaffinity(0, {int(core)})
        disturb(Path(file)) if role == "disturb" else probe(Path(file))
        return
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(core)) for core in cores]
        children = [start("probe", core, file) for core, file in zip(cores, files, strict=True)]
        try:
            wait_for(files, arguments.probes)
            begun = Path(folder, "begun")
            children.append(start("disturb", cores[1], begun))
            while not begun.exists():
                time.sleep(0.01)
            undisturbed = wait_for(files, 0)
            wait_for(files, undisturbed + DISTURBED)
        finally:
            for child in children:
                child.kill()
                child.wait()
        print(json.dumps(judged(read(files), undisturbed)))


def start(role: str, core: int, file: Path) -> subprocess.Popen[bytes]:
    """A process of this script in another role."""
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, __file__, "--as", role, str(core), str(file)], env=variables)


def probe(file: Path) -> None:
    """Probes for ever, as a run does."""
    import jax

    from jaxtrain.resilience.probe import Probe

    probe = Probe(jax.devices()[:1])
    with file.open("w") as lines:
        while True:
            (result,) = probe()
            assert not result.wrong
            lines.write(f"{result.seconds}\n")
            lines.flush()
            time.sleep(PAUSE)


def disturb(begun: Path) -> None:
    """Takes a share of the core for ever, before any real-time process of the same priority."""
    if priority := os.sched_getparam(0).sched_priority:
        os.sched_setparam(0, os.sched_param(priority + 1))
    begun.touch()
    while True:
        until = time.perf_counter() + PERIOD * SHARE
        while time.perf_counter() < until:
            pass
        time.sleep(PERIOD * (1 - SHARE))


def wait_for(files: list[Path], count: int) -> int:
    """Until all processes have so many probes; returns how many there are."""
    while not all(file.exists() for file in files) or read(files).shape[1] < count:
        time.sleep(0.1)
    return read(files).shape[1]


def read(files: list[Path]) -> np.ndarray:
    """Seconds, rank by probe."""
    told = [[float(line) for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n"] for file in files]
    count = min(map(len, told))
    return np.array([seconds[:count] for seconds in told])


def judged(times: np.ndarray, undisturbed: int) -> dict[str, object]:
    """Each probe judged as in a run."""
    config, named, alarms, seen = HealthConfig(), set(), 0, None
    for last in range(1, times.shape[1]):
        kept = np.concatenate([times[:, :1], times[:, max(1, last + 2 - KEPT_PROBES) : last + 1]], axis=1)
        score = scores(kept, config.threshold, ["cpu", "cpu"], hosts=2)
        new = {rank for rank in (0, 1) if score[rank] >= config.patience} - named
        named = {rank for rank in named | new if score[rank] > 0}
        if last < undisturbed:
            alarms += len(new)
        elif 1 in new and seen is None:
            seen = last - undisturbed + 1
    ratio = np.log(times[1] / times[0])
    quiet = slice(0, undisturbed)
    return {
        "probe_ms": [round(1000 * float(each), 2) for each in np.median(times[:, quiet], axis=1)],
        "scatter": round(float(np.median(np.abs(np.diff(ratio[quiet]))) * 1.4826 / np.sqrt(2)), 3),
        "undisturbed_probes": undisturbed,
        "false_alarms": alarms,
        "slower_by": round(float(np.expm1(np.median(ratio[undisturbed + 5 :]) - np.median(ratio[quiet]))), 2),
        "named_after_probes": seen,
    }


if __name__ == "__main__":
    main()
