import json
import math

import numpy as np
import pytest

from jaxtrain.telemetry.metrics import MetricsWriter, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write_steps(path, steps, resume_step=0, run="first"):
    with MetricsWriter(path, resume_step) as metrics:
        for step in steps:
            metrics.write(step=step, loss=float(step), run=run)


def test_each_line_is_readable_as_soon_as_it_is_written(path):
    with MetricsWriter(path, 0) as metrics:
        metrics.write(step=1, loss=2.5)
        assert read_metrics(path) == [{"step": 1, "loss": 2.5}]


def test_a_resumed_run_leaves_one_value_per_step(path):
    write_steps(path, range(1, 9))
    write_steps(path, range(6, 13), resume_step=5, run="second")
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["run"] for line in lines] == ["first"] * 5 + ["second"] * 7


def test_evaluation_lines_of_repeated_steps_are_dropped_too(path):
    with MetricsWriter(path, 0) as metrics:
        metrics.write(step=5, eval_loss=1.0)
        metrics.write(step=8, eval_loss=2.0)
    MetricsWriter(path, 5).close()
    assert read_metrics(path) == [{"step": 5, "eval_loss": 1.0}]


def test_a_new_start_keeps_nothing_not_even_an_evaluation_of_step_0(path):
    with MetricsWriter(path, 0) as metrics:
        metrics.write(step=0, eval_loss=1.0)
        metrics.write(step=1, loss=1.0)
    MetricsWriter(path, 0).close()
    assert read_metrics(path) == []


def test_a_line_torn_by_a_crash_is_passed_over_and_never_glued_to_the_next(path):
    write_steps(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write_steps(path, [3], resume_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_last_line_without_newline_counts_as_torn_even_if_it_parses(path):
    write_steps(path, [1])
    with path.open("a") as file:
        file.write('{"step": 22}')  # of {"step": 22000} perhaps
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_a_broken_line_in_the_middle_is_passed_over_with_a_warning_that_names_it(path, caplog):
    write_steps(path, [1])
    with path.open("a") as file:
        file.write("\x00\x00\n[1]\n")
    write_steps(path, [2], resume_step=1)
    with path.open("a") as file:
        file.write("oops\n")
    caplog.clear()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert f"{path}, line 3 is not a JSON object" in caplog.text


def test_non_finite_values_stay_strict_json_and_come_back_as_they_were(path):
    with MetricsWriter(path, 0) as metrics:
        metrics.write(step=1, loss=math.nan, grad_norm=math.inf, floor=-math.inf, tokens=3)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    on_disk = json.loads(path.read_text(), parse_constant=refuse)
    assert on_disk["loss"] is None
    assert on_disk["non_finite"] == {"loss": "nan", "grad_norm": "inf", "floor": "-inf"}
    (line,) = read_metrics(path)
    assert math.isnan(line.pop("loss"))
    assert line == {"step": 1, "grad_norm": math.inf, "floor": -math.inf, "tokens": 3}


def test_array_scalars_are_written_as_numbers(path):
    with MetricsWriter(path, 0) as metrics:
        metrics.write(step=np.int32(7), loss=np.float32(0.5), tokens=np.array(9))
    assert json.loads(path.read_text()) == {"step": 7, "loss": 0.5, "tokens": 9}


def test_opening_leaves_no_temporary_file(path):
    write_steps(path, [1, 2])
    MetricsWriter(path, 1).close()
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_lines_that_are_none_of_ours_are_passed_over_on_resume(path):
    write_steps(path, range(1, 4))
    with path.open("a") as file:
        file.write('{"step": "2"}\n{"step": null}\n{"loss": 1.0}\n{"step": 1, "non_finite": 3}\n[1]\n')
    write_steps(path, [4], resume_step=3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
