"""A run on fewer processes keeps its batch: the mesh gets smaller, and passes more."""

from pathlib import Path

import pytest

from jaxtrain.config import Config, check_layout, load, resolve_mesh
from jaxtrain.errors import ConfigError
from jaxtrain.launchers.sizes import Size, in_words, largest, with_overrides, workable_sizes

CASES = {
    "data adapts by itself": ([], {1: "microbatch=3", 2: "microbatch=3", 3: "microbatch=2"}),
    "a batch that three can't divide": (["global_batch=8"], {1: "microbatch=2", 2: "microbatch=2"}),
    "more passes of the size that is set": (["microbatch=3"], {1: "", 2: "", 3: "microbatch=2"}),
    "data that is spelled out": (
        ["mesh.data=4", "microbatch=1"],
        {1: "mesh.data=1", 2: "mesh.data=2", 3: "mesh.data=3"},
    ),
    "data first, then fsdp": (["mesh.data=2", "mesh.fsdp=2", "microbatch=3"], {2: "mesh.data=1"}),
    "fsdp where there is no data": (
        ["mesh.data=1", "mesh.fsdp=4", "microbatch=1"],
        {1: "mesh.fsdp=1", 2: "mesh.fsdp=2"},
    ),
    "never the heads": (["mesh.data=1", "mesh.tensor=4"], {}),
    "a ramp divides too": (
        ["batch_ramp=[{steps: 2, global_batch: 4}]"],
        {1: "microbatch=2", 2: "microbatch=2"},
    ),
}  # fmt: skip


def config(folder: Path, *overrides: str) -> Config:
    path = folder / "config.yml"
    path.write_text("run_dir: r\nsteps: 5\nglobal_batch: 12\nmodel: {heads: 4, kv_heads: 4}\ndata: {dir: d}\n")
    return load(path, overrides)


@pytest.mark.parametrize("name", CASES)
def test_what_changes_for_each_number_of_processes(name: str, tmp_path: Path) -> None:
    overrides, expected = CASES[name]
    found = workable_sizes(config(tmp_path, *overrides), devices=1, most=4)
    assert {size: " ".join(given.overrides) for size, given in found.items()} == {4: "", **expected}


@pytest.mark.parametrize("name", CASES)
def test_each_size_passes_the_checks_of_a_start_and_no_pass_is_larger(name: str, tmp_path: Path) -> None:
    overrides, _ = CASES[name]
    full = config(tmp_path, *overrides)
    whole = rows_of_a_pass(full, 4)
    for size, given in workable_sizes(full, devices=1, most=4).items():
        smaller = config(tmp_path, *with_overrides(overrides, given.overrides))
        check_layout(smaller, resolve_mesh(smaller.mesh, size))
        assert rows_of_a_pass(smaller, size) <= whole
        assert smaller.batches == full.batches


def rows_of_a_pass(of: Config, devices: int) -> int:
    mesh = resolve_mesh(of.mesh, devices)
    return of.microbatch or max(of.batches.sizes) // (mesh["data"] * mesh["fsdp"])


def test_overrides_take_the_place_of_those_that_were_given() -> None:
    given = ["config.yml", "mesh.data=4", "--microbatch=2", "seed=1"]
    expected = ["config.yml", "seed=1", "mesh.data=2", "microbatch=1"]
    assert with_overrides(given, ["mesh.data=2", "microbatch=1"]) == expected


def test_a_process_of_several_devices_counts_as_these(tmp_path: Path) -> None:
    found = workable_sizes(config(tmp_path, "mesh.tensor=2"), devices=2, most=3)
    assert set(found) == {1, 2, 3}
    assert found[1].overrides == ("microbatch=4",)


def test_a_full_size_that_cannot_work_is_refused_by_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch=12 doesn't divide over 5 batch shards"):
        workable_sizes(config(tmp_path), devices=1, most=5)


def test_the_largest_size_between_two_is_taken() -> None:
    sizes = {size: Size(size) for size in (1, 2, 4, 8)}
    assert largest(sizes, at_most=7, at_least=2) == Size(4)
    assert largest(sizes, at_most=7, at_least=5) is None
    assert in_words(sizes) == "1, 2, 4 or 8"
