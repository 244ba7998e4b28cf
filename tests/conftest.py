"""The world that every test runs in: eight virtual CPU devices and one compile cache, for child processes too."""

import functools
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flags import FAST_COMPILATION, virtual_devices

DEVICES = 8
COMPILE_CACHE = Path(__file__).resolve().parents[1] / ".cache" / "compile"

if "jax" in sys.modules:
    raise pytest.UsageError(
        "jax was imported before tests/conftest.py could choose its devices; look for a plugin that does"
    )


def _for_tests(xla_flags: str) -> str:
    """The flags with eight virtual devices and fast compilation.

    Child processes (`tests.runs.environment`) have the same, unless they are asked to compile as users do.
    """
    ours = [virtual_devices(DEVICES), *FAST_COMPILATION.split()]
    names = "|".join(flag.partition("=")[0] for flag in ours)
    return " ".join([*re.sub(rf"(?:{names})=\S*", "", xla_flags).split(), *ours])


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So it is where a shell runs the tests in the background, and child processes would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = _for_tests(os.environ.get("XLA_FLAGS", ""))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILE_CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        "two_processes",
        "preemption",
        "watchdog",
        "launch",
        "drill",
        "families",
        "kill",
        "layouts",
        "agreement",
        "digits",
        "resume",
        "gpu_programs",
        "products",
        "verify",
    )
)
"""The files that take longest, which begin first, so that neither worker is left with one of them at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first and leaves all else in its order (pyproject.toml keeps xdist from changing it)."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _programs() -> Iterator[None]:
    """Each program is built and compiled once for all runs in this process."""
    from tests.programs import programs_built_once  # not before the environment is set

    with programs_built_once():
        yield


MOST_MEMORY_MAPS = 20_000
"""A third of what Linux gives a process. Each kernel of a program takes some; where none is left, LLVM crashes."""


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a file of tests: forgets all compiled programs, and what the file keeps, before they are too many."""
    yield
    if len(Path("/proc/self/maps").read_text().splitlines()) < MOST_MEMORY_MAPS:
        return
    import jax

    from tests.programs import forget

    for kept in vars(request.module).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()
    forget()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def programs_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of this test builds and compiles its program, as a new process does."""
    from jaxtrain import loop, program

    monkeypatch.setattr(loop, "build", program.build)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 52 rows of up to 32 tokens, one document each when not packed, and 11 held-out rows."""
    from tests.factories import make_dataset, make_documents  # not before the environment is set

    folder = tmp_path_factory.mktemp("data") / "tiny"
    train = make_documents([2 + (7 * index) % 32 for index in range(52)])
    make_dataset(folder, train, make_documents([2 + 3 * index for index in range(11)], seed=1))
    return folder


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Callable[..., Path]:
    """Mesh, family to the directory of a run of 10 steps that nobody disturbed: dropout, shuffle, checkpoints 5 and 10.

    Each is run once for all tests: copy the directory before anything is changed in it.
    """
    from tests.runs import MESHES, run_here, straight_overrides, tiny_config

    @functools.cache
    def run(mesh: str, family: str = "decoder") -> Path:
        devices, overrides = MESHES[mesh]
        folder = tmp_path_factory.mktemp("straight")
        config = tiny_config(folder, tiny_data, *straight_overrides(family), *overrides)
        run_here(config, devices)
        return config.run_dir

    return run
