import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.executables import load_or_compile

THREE = jnp.float32(3)


def lowered(factor: float) -> jax.stages.Lowered:
    return jax.jit(lambda x: {"product": x * factor}).lower(THREE)


def load(factor: float, folder: Path, device: int = 0) -> float:
    compiled = load_or_compile(lowered(factor), [jax.devices()[device]], folder)
    return float(compiled(THREE)["product"])


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_compiled_once_is_loaded_later(tmp_path: Path) -> None:
    assert load(2, tmp_path) == 6
    doubling = only_file(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    assert load(5, other) == 15
    doubling.write_bytes(only_file(other).read_bytes())  # what is here now is run, whatever it is
    other.joinpath(only_file(other).name).unlink()
    other.rmdir()
    assert load(2, tmp_path) == 15


def of_another_build(_: bytes) -> bytes:
    return hashlib.sha256(b"whole").digest() + b"whole"


@pytest.mark.parametrize(
    "damage", [lambda good: good[: len(good) // 2], lambda good: good[:-1] + b"?", lambda _: b"", of_another_build]
)
def test_one_that_is_torn_altered_or_of_another_build_is_compiled_again(damage, tmp_path: Path) -> None:
    load(2, tmp_path)
    path = only_file(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert load(2, tmp_path) == 6
    assert only_file(tmp_path).stat().st_size == pytest.approx(len(good), rel=0.1)


def test_other_programs_devices_and_flags_have_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(2, tmp_path)
    load(3, tmp_path)
    load(2, tmp_path, device=1)
    monkeypatch.setenv("XLA_FLAGS", "--other")
    load(2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_where_nothing_can_be_written_it_is_compiled(tmp_path: Path) -> None:
    assert load(2, tmp_path / "absent") == 6


def test_a_program_that_calls_back_into_python_is_compiled_at_each_start(tmp_path: Path) -> None:
    for _ in range(2):
        seen: list[float] = []

        def telling(x: jax.Array, seen: list[float] = seen) -> jax.Array:
            jax.debug.callback(lambda value: seen.append(float(value)), x)
            return 2 * x

        compiled = load_or_compile(jax.jit(telling).lower(THREE), [jax.devices()[0]], tmp_path)
        assert float(compiled(THREE)) == 6
        jax.effects_barrier()
        assert seen == [3.0]
    assert list(tmp_path.iterdir()) == []
