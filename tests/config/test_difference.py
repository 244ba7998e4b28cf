"""What a resumed run is told about keys that changed."""

from typing import Any

import pytest

from jaxtrain.config import Config, Difference, difference, format_differences
from jaxtrain.config.difference import ABSENT


def config(**sections: Any) -> Config:
    return Config.model_validate({"run_dir": "r", "steps": 10, **sections})


def test_the_same_config_has_no_difference() -> None:
    assert difference(config().to_dict(), config()) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"seed": 1}, Difference("seed", 0, 1, may_change=False)),
        ({"steps": 20}, Difference("steps", 10, 20, may_change=False)),
        ({"run_dir": "s"}, Difference("run_dir", "r", "s", may_change=True)),
        ({"mesh": {"fsdp": 8}}, Difference("mesh.fsdp", 1, 8, may_change=True)),
        ({"model": {"loss": {"chunk": 1}}}, Difference("model.loss.chunk", 2048, 1, may_change=True)),
        ({"model": {"loss": {"z": 0.5}}}, Difference("model.loss.z", 0.0, 0.5, may_change=False)),
        ({"model": {"window": 8}}, Difference("model.window", None, 8, may_change=False)),
        ({"eval": {"sets": {"wiki": "d"}}}, Difference("eval.sets.wiki", ABSENT, "d", may_change=True)),
    ],
)
def test_a_changed_key_is_found_and_knows_whether_it_may_change(sections: dict[str, Any], expected: Difference) -> None:
    assert difference(config().to_dict(), config(**sections)) == [expected]


def test_another_optimizer_shows_its_name_and_the_keys_it_lost() -> None:
    found = difference(config().to_dict(), config(optimizer={"name": "sgd", "momentum": 0.5}))
    assert [(change.key, change.saved, change.now) for change in found] == [
        ("optimizer.name", "adamw", "sgd"),
        ("optimizer.weight_decay", 0.1, 0.0),
        ("optimizer.momentum", 0.9, 0.5),
        ("optimizer.b1", 0.9, ABSENT),
        ("optimizer.b2", 0.95, ABSENT),
        ("optimizer.epsilon", 1e-8, ABSENT),
    ]
    assert not any(change.may_change for change in found)


def test_a_nullable_section_is_compared_as_a_whole() -> None:
    scaling = {"factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_sequence": 8192}
    now = config(model={"rope": {"scaling": scaling}})
    assert difference(config().to_dict(), now) == [Difference("model.rope.scaling", None, scaling, may_change=False)]
    saved = now.to_dict()
    saved["model"]["rope"]["scaling"]["factor"] = 2.0
    assert difference(saved, now) == [Difference("model.rope.scaling.factor", 2.0, 8.0, may_change=False)]


def test_a_key_that_the_saved_run_did_not_have_counts_as_its_default() -> None:
    saved = config().to_dict()
    del saved["seed"], saved["eval"], saved["model"]["loss"]["z"], saved["compile_cache"]
    assert difference(saved, config()) == []
    assert [change.key for change in difference(saved, config(seed=3, eval={"every": 5}))] == ["seed", "eval.every"]
    assert difference({}, config()) == [
        Difference("run_dir", ABSENT, "r", may_change=True),
        Difference("steps", None, 10, may_change=False),
    ]


def test_a_key_that_no_longer_exists_may_not_change() -> None:
    saved = config().to_dict() | {"turbo": {"on": True}}
    saved["model"]["gone"] = 3
    assert difference(saved, config()) == [
        Difference("model.gone", 3, ABSENT, may_change=False),
        Difference("turbo", {"on": True}, ABSENT, may_change=False),
    ]


def test_a_section_that_was_saved_as_a_value_is_shown() -> None:
    (change,) = difference(config().to_dict() | {"eval": 5}, config())
    assert (change.key, change.saved) == ("eval", 5)


def test_differences_are_printed_in_aligned_lines() -> None:
    changes = difference(config().to_dict(), config(seed=1, model={"window": 8, "activation": "gelu"}))
    assert format_differences(changes).splitlines() == [
        "seed:             0      -> 1",
        'model.activation: "silu" -> "gelu"',
        "model.window:     null   -> 8",
    ]
    assert str(changes[0]) == "seed: 0 -> 1"
    assert format_differences([]) == ""
