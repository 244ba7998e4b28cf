"""Options in combination: whatever is put together trains as on one device, or is refused by its keys.

Rows are chosen so that every two values of different options meet in one of them (a covering set of pairs).
"""

import functools
import itertools
import random
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.program import Program
from tests.runs import Trained, assert_same_first_moments, make_batches, tiny_program, train_on

STEPS = 2
OPTIONS: dict[str, dict[str, list[str]]] = {
    "mesh": {
        "pipeline=2 fsdp=2": ["mesh.pipeline=2", "mesh.fsdp=2"],
        "pipeline=2 data=2": ["mesh.pipeline=2", "mesh.data=2"],
        "pipeline=2 tensor=2": ["mesh.pipeline=2", "mesh.tensor=2"],
        "data=2 fsdp=2": ["mesh.data=2", "mesh.fsdp=2"],
    },
    "schedule": {
        "gpipe": ["pipeline.schedule=gpipe"],
        "1f1b": ["pipeline.schedule=1f1b"],
        "interleaved": ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"],
        "chunks of gpipe": ["pipeline.schedule=gpipe", "pipeline.chunks=2"],
    },
    "micro-batches of": {
        "all rows": [],
        "1": ["microbatch=1"],
        "2": ["microbatch=2"],
        "3": ["microbatch=3"],
    },
    "rows": {"packed": ["data.pack=true"], "single documents": ["data.pack=false"]},
    "head": {"own": [], "tied": ["model.tied_embeddings=true"]},
    "dropout": {"0": [], "0.3": ["model.dropout=0.3"]},
    "remat": {
        "none": [],
        "full": ["remat=full"],
        "dots": ["remat=dots"],
        "named": ["remat=named", "remat_save=[query, hidden]", "remat_offload=[residual]"],
    },
    "zero": {"0": [], "1": ["sharding.zero=1"], "2": ["sharding.zero=2"]},
    "gather": {"for each": ["fsdp.gather=microbatch"], "once": ["fsdp.gather=step"]},
    "optimizer": {
        "adamw": ["optimizer={name: adamw, learning_rate: 1e-3}"],
        "adafactor": ["optimizer={name: adafactor, learning_rate: 1e-2, factored_from: 16}"],
        "muon": ["optimizer={name: muon, learning_rate: 1e-3}"],
    },
}
"""Option to its values, each with the overrides that it takes."""

SAME_ON_ONE_DEVICE = ("rows", "head", "dropout", "optimizer")
Choice = Mapping[str, str]


def reasons(choice: Choice) -> list[list[str]]:
    """Why a choice isn't right: the keys that its refusal names; none where it is."""
    found = []
    if choice["schedule"] == "chunks of gpipe":
        found.append(["pipeline.chunks=2", "pipeline.schedule=gpipe"])
    if choice["micro-batches of"] == "3":
        found.append(["microbatch=3", "global_batch=8"])
    return found


def covering_set(wrong: int) -> list[Choice]:
    """Rows with so many reasons to refuse them, in which all pairs of values meet that meet in any; found greedily."""
    draw = random.Random(0)
    drawn = [{option: draw.choice(list(values)) for option, values in OPTIONS.items()} for _ in range(20000)]
    candidates = [row for row in drawn if len(reasons(row)) == wrong]
    pairs = {id(row): set(itertools.combinations(row.items(), 2)) for row in candidates}
    left = set().union(*pairs.values())
    if wrong:  # what is refused has been seen refused beside each other value
        left = {pair for pair in left if any(value in REFUSED for value in pair)}
    rows: list[Choice] = []
    while left:
        rows.append(max(candidates, key=lambda row: len(pairs[id(row)] & left)))
        left -= pairs[id(rows[-1])]
    return rows


def overrides(choice: Choice, options: Any = tuple(OPTIONS)) -> list[str]:
    return [override for option in options for override in OPTIONS[option][choice[option]]]


REFUSED = {("schedule", "chunks of gpipe"), ("micro-batches of", "3")}
RIGHT, WRONG = covering_set(0), covering_set(1)


def named(rows: list[Choice]) -> list[Any]:
    return [pytest.param(row, id=", ".join(f"{option} {value}" for option, value in row.items())) for row in rows]


def batches_of(choice: Choice) -> list[dict[str, np.ndarray]]:
    """Two batches; some tokens aren't counted, and some rows not at all."""
    batches = make_batches(STEPS)
    if choice["rows"] == "packed":
        return batches
    place = np.broadcast_to(np.arange(32), (8, 32))
    return [{**batch, "segments": np.ones_like(place), "positions": place} for batch in batches]


def program_of(choice: Choice, options: Any = tuple(OPTIONS)) -> Program:
    devices = 1
    for override in OPTIONS["mesh"][choice["mesh"]] if "mesh" in options else []:
        devices *= int(override.partition("=")[2])
    return tiny_program(devices, "model.layers=4", *overrides(choice, options))


@functools.cache
def initial_state(head: str, optimizer: str) -> Any:
    """On the host: placed from there, no program of a row has to initialise anything."""
    program = program_of({"head": head, "optimizer": optimizer}, ("head", "optimizer"))
    return jax.tree.map(np.array, program.init(program.initial_key()))


def trained(program: Program, choice: Choice) -> Trained:
    state = initial_state(choice["head"], choice["optimizer"])
    placed = jax.tree.map(lambda leaf, planned: jax.device_put(leaf, planned.sharding), state, program.state)
    return train_on(program, batches_of(choice), state=placed)


@functools.cache
def alone(*values: str) -> Trained:
    choice = dict(zip(SAME_ON_ONE_DEVICE, values, strict=True))
    return trained(program_of(choice, SAME_ON_ONE_DEVICE), choice)


def test_every_two_values_meet_in_a_row_that_trains_or_in_one_that_is_refused() -> None:
    assert len(RIGHT) < 30
    for one, other in itertools.combinations(OPTIONS, 2):
        met = {(row[one], row[other]) for row in [*RIGHT, *WRONG]}
        apart = {(a, b) for a, b in itertools.product(OPTIONS[one], OPTIONS[other]) if {(one, a), (other, b)} & REFUSED}
        assert met >= set(itertools.product(OPTIONS[one], OPTIONS[other])) - apart, (one, other)


@pytest.mark.parametrize("choice", named(WRONG))
def test_what_is_not_right_is_refused_by_its_keys(choice: Choice) -> None:
    with pytest.raises(ConfigError) as refused:
        program_of(choice)
    for key in reasons(choice)[0]:
        assert key in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("choice", named(RIGHT))
def test_what_is_not_refused_trains_as_on_one_device(choice: Choice) -> None:
    tolerance = 1e-4 if "pipeline" in choice["mesh"] else 1e-5
    split, one = trained(program_of(choice), choice), alone(*(choice[it] for it in SAME_ON_ONE_DEVICE))
    np.testing.assert_allclose(split.losses, one.losses, rtol=tolerance)
    assert_same_first_moments(split, one, tolerance)
