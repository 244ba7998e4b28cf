"""What is no task is refused before anything is compiled, with the method, what it gave and what it must give."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.contract import METHODS, refuse_what_is_no_task
from jaxtrain.models.task import ArraySpec, Mean, Task
from scripts.own_task import Regression


def refusal(task: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_what_is_no_task(task, "model.target=m:T")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@dataclass(frozen=True)
class Changed(Regression):
    """The example with one method that gives something else."""

    name: str = ""
    gives: Any = None

    def __getattribute__(self, attribute: str) -> Any:
        read = object.__getattribute__
        return read(self, "gives") if attribute == read(self, "name") else read(self, attribute)


def test_the_example_is_a_task() -> None:
    refuse_what_is_no_task(Regression(64), "model.target=m:T")


def test_the_contract_has_the_methods_of_the_protocol() -> None:
    assert set(METHODS) == {
        "init", "denominators", "losses", "metrics", "counted", "example_batch", "flops", "shrunk",
    }  # fmt: skip


def test_missing_methods_are_named_also_where_the_protocol_is_inherited() -> None:
    class Half(Task):
        def init(self, key: Any) -> Any:
            return {}

        def losses(self, params: Any, batch: Any, key: Any) -> Any:
            return {}

        flops = shrunk = counted = example_batch = losses

    assert "gives a Half that lacks denominators and metrics; jaxtrain/models/task.py says" in refusal(Half())
    assert f"gives a int that lacks {', '.join(METHODS[:-1])} and {METHODS[-1]}" in refusal(3)


ROWS = ("batch",)
OTHERS: dict[str, tuple[str, Any, str]] = {
    "bare arrays": (
        "init", lambda key: {"weight": jnp.ones(3)}, "init(key): weight has no logical axes and role; make it with",
    ),
    "no parameters": ("init", lambda key: {}, "init(key) gives an empty dictionary; it must be a dictionary of"),
    "losses without denominators": (
        "losses", lambda params, batch, key: {"err": jnp.float32(0)},
        "losses are err, but denominators are error; each loss needs the denominator of its name",
    ),
    "a mean of each row": (
        "losses", lambda params, batch, key: {"error": batch["height"]},
        "losses(params, batch, key): error is an array of shape (8,) and dtype float32; it must be one floating-point",
    ),
    "one bare loss": (
        "losses", lambda params, batch, key: batch["height"].sum(),
        "losses(params, batch, key) gives an array of shape () and dtype float32; it must be a dictionary of sums",
    ),
    "whole denominators": (
        "denominators", lambda batch: {"error": jnp.int32(3)}, "error is an array of shape () and dtype int32; it must",
    ),
    "metrics without the loss": (
        "metrics", lambda params, batch: {"rmse": Mean(jnp.float32(0), jnp.float32(0))},
        "metrics(params, batch) gives a dictionary of rmse.total and rmse.weight; it must be a dictionary with loss",
    ),
    "metrics that can't be merged": (
        "metrics", lambda params, batch: {"loss": jnp.float32(0)},
        "loss is an array of shape () and dtype float32; it must have result()",
    ),
    "a share for a count": (
        "counted", lambda batch: batch["weights"].mean(), "counted(batch) gives an array of shape () and dtype float32",
    ),
    "bare shapes": ("example_batch", lambda rows: {"place": (rows, 2)}, "place is a tuple; it must be an ArraySpec"),
    "rows not first": (
        "example_batch", lambda rows: {"place": ArraySpec((2, rows), jnp.float32, (None, "batch"))},
        "place has shape (2, 8) and axes (None, 'batch'); rows come first",
    ),
    "a name of ours": (
        "example_batch", lambda rows: {"row": ArraySpec((rows,), jnp.int32, ROWS)}, "an array named row, which the",
    ),
    "a bare number": ("flops", lambda rows: 3.0, "flops(rows) gives a float; it must be a Flops"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_a_method_that_gives_something_else_is_named_with_what_it_gave(case: str) -> None:
    name, gives, words = OTHERS[case]
    assert words in refusal(Changed(64, name, gives))


def test_parameters_of_another_type_are_refused() -> None:
    def halves(key: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), Regression(64).init(key))

    assert re.search(r"init\(key\): \w+ is bfloat16; parameters are float32", refusal(Changed(64, "init", halves)))
