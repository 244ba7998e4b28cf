"""`steps` may change on resume where the run so far is the one that the new length would have given."""

from pathlib import Path

import numpy as np
import pytest

from jaxtrain.continuation import learning_rates
from jaxtrain.errors import ConfigError
from tests.runs import (
    STRAIGHT,
    checkpoint_meta,
    checkpoint_steps,
    content,
    crash_after,
    events,
    row_log,
    run_here,
    step_losses,
    tiny_config,
)

CONSTANT = [*STRAIGHT, "optimizer.schedule={kind: constant, warmup: 3}"]


def config_of(folder: Path, data: Path, steps: int, name: str = "run", *overrides: str):
    return tiny_config(folder, data, *(overrides or CONSTANT), f"steps={steps}", f"run_dir={folder / name}")


def test_a_finished_run_goes_on_bit_equal_to_one_that_was_longer_from_the_start(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(config_of(tmp_path, tiny_data, 8, "longer"))
    run_here(config_of(tmp_path, tiny_data, 5))
    assert checkpoint_steps(tmp_path / "run") == [5]
    capsys.readouterr()
    run_here(config_of(tmp_path, tiny_data, 8))
    assert "steps was 5 and is 8 now" in capsys.readouterr().out
    assert [event["step"] for event in events(tmp_path / "run", "restore")] == [5]
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "longer")
    assert row_log(tmp_path / "run") == row_log(tmp_path / "longer")
    ours, theirs = (checkpoint_meta(tmp_path / name, 8) for name in ("run", "longer"))
    assert ours["checksums"] == theirs["checksums"]
    assert ours["config"]["steps"] == 8


def test_a_run_may_also_end_earlier_but_not_before_what_is_done(tmp_path: Path, tiny_data: Path) -> None:
    with crash_after(7):
        run_here(config_of(tmp_path, tiny_data, 10))
    with pytest.raises(ConfigError, match="5 steps are done already, so steps must be at least 5"):
        run_here(config_of(tmp_path, tiny_data, 4))
    run_here(config_of(tmp_path, tiny_data, 6))
    assert checkpoint_steps(tmp_path / "run") == [5, 6]
    assert sorted(step_losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_a_schedule_that_knew_the_old_length_is_refused_with_what_else_to_do(tmp_path: Path, tiny_data: Path) -> None:
    cosine = [*STRAIGHT, "optimizer.schedule={kind: cosine, warmup: 2}"]
    run_here(config_of(tmp_path, tiny_data, 5, "run", *cosine))
    before = content(tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        run_here(config_of(tmp_path, tiny_data, 8, "run", *cosine))
    assert content(tmp_path / "run") == before
    message = str(error.value)
    assert "steps: 5 -> 8" in message
    assert "with schedule.kind=cosine the 5 updates done would have had another learning rate (update 3: " in message
    assert f"start a new run from its parameters with init_from={tmp_path / 'run'}" in message


def test_a_schedule_that_had_not_come_to_its_decay_may_still_change(tmp_path: Path, tiny_data: Path) -> None:
    """The rule looks at the learning rates of the updates done, not at the schedule's name."""
    cosine = [*STRAIGHT, "optimizer.schedule={kind: cosine, warmup: 5}"]
    run_here(config_of(tmp_path, tiny_data, 9, "longer", *cosine))
    with crash_after(6):
        run_here(config_of(tmp_path, tiny_data, 7, "run", *cosine))
    run_here(config_of(tmp_path, tiny_data, 9, "run", *cosine))
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "longer")


def test_a_stable_schedule_may_be_lengthened_until_it_decays(tmp_path: Path, tiny_data: Path) -> None:
    stable = [*STRAIGHT, "optimizer.schedule={kind: wsd, warmup: 2, decay: 0.375}"]
    run_here(config_of(tmp_path, tiny_data, 12, "longer", *stable))
    with crash_after(6):  # step 5 is saved, and the decay would begin after it
        run_here(config_of(tmp_path, tiny_data, 8, "run", *stable))
    run_here(config_of(tmp_path, tiny_data, 12, "run", *stable))
    assert [event["step"] for event in events(tmp_path / "run", "restore")] == [5]
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "longer")
    with pytest.raises(
        ConfigError, match=r"kind=wsd the 12 updates done would have had another learning rate \(update 9:"
    ):
        run_here(config_of(tmp_path, tiny_data, 14, "run", *stable))


@pytest.mark.parametrize("schedule", ["{kind: inverse_sqrt, warmup: 2}", "{kind: constant}"])
def test_a_schedule_without_an_end_may_always_be_lengthened(schedule: str, tmp_path: Path, tiny_data: Path) -> None:
    config = config_of(tmp_path, tiny_data, 10, "run", f"optimizer.schedule={schedule}", "optimizer.batch_scaling=none")
    np.testing.assert_array_equal(learning_rates(config, 10, 10), learning_rates(config, 1000, 10))


def test_the_rates_are_those_that_a_run_applies(tmp_path: Path, tiny_data: Path) -> None:
    config = config_of(tmp_path, tiny_data, 6, "run", "optimizer.schedule={kind: cosine, warmup: 2}")
    applied = [line["learning_rate"] for line in run_here(config)]
    np.testing.assert_allclose(learning_rates(config, 6, 6), applied, rtol=1e-6)


def test_a_length_given_by_the_data_is_not_changed_into_one_in_steps(tmp_path: Path, tiny_data: Path) -> None:
    epochs = [*CONSTANT, "data.epochs=1", "data.pack=false"]
    config = tiny_config(tmp_path, tiny_data, *epochs, "steps=null")
    with crash_after(6):
        run_here(config)
    with pytest.raises(ConfigError, match="steps: null -> 6"):
        run_here(config_of(tmp_path, tiny_data, 6, "run", *epochs))


def test_another_key_beside_steps_is_refused_as_ever(tmp_path: Path, tiny_data: Path) -> None:
    run_here(config_of(tmp_path, tiny_data, 3))
    with pytest.raises(ConfigError) as error:
        run_here(config_of(tmp_path, tiny_data, 4, "run", *CONSTANT, "seed=4"))
    assert "these keys may not change" in str(error.value)
    assert "seed:" in str(error.value)
