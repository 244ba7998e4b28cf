import errno
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxtrain import report
from jaxtrain.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, EXIT_INTERRUPTED, ConfigError
from jaxtrain.files import replace_json
from jaxtrain.telemetry.events import EventLog
from jaxtrain.telemetry.metrics import MetricsWriter
from jaxtrain.telemetry.norms import as_json
from jaxtrain.telemetry.pictures import evaluation_title, running_median
from jaxtrain.telemetry.run_files import read_run
from jaxtrain.telemetry.timeline import Timeline


@pytest.fixture
def run_dir(tmp_path):
    """Ten of twelve planned steps with a restart after the fourth, stopped by hand."""
    path = tmp_path / "my-run"
    path.mkdir()
    (path / "config.yml").write_text("steps: 12\n")
    replace_json(path / "run.json", {"git": {"commit": "0123456789abcdef", "dirty": True}})
    with MetricsWriter(path / "metrics.jsonl", 0) as metrics:
        for step in range(1, 11):
            write_step(metrics, step)
            if step % 5 == 0:
                metrics.write(step=step, eval_loss=8.0 if step == 5 else 8.5, eval_accuracy=0.25)
                metrics.write(step=step, eval_code_loss=7.0 if step == 5 else math.nan)
    with EventLog(path / "events.jsonl") as events:
        events.write("start", step=0, steps=12)
        events.write("save", step=4, seconds=0.5)
        events.write("start", step=4, steps=12)
        for _ in range(2):  # the second time after a crash
            events.write("skip", step=6, position=48, reason="non-finite")
        events.write("save", step=8, seconds=1.5)
        events.write("profile", first=7, last=9, seconds=0.5)
        events.write("stop", step=10, reason="interrupted", exit_code=130)
    return path


def write_step(metrics, step, **changed):
    values = {
        "loss": 10.0 - step / 10,
        "learning_rate": 1e-3,
        "tokens": 100,
        "tokens_per_second": 1000 + step,
        "step_seconds": 0.1 * step,
        "data_wait": 0.5 if step == 5 else 0.0,
    }
    metrics.write(step=step, **(values | changed))


def test_the_summary_tells_what_happened(run_dir):
    rows = report.summary(read_run(run_dir))
    assert rows.pop("wall time").startswith("0:00:0")
    assert rows == {
        "steps": "10 of 12",
        "training loss": "9.9000 first, 9.0000 last",
        "evaluation loss": "8.0000 best (step 5), 8.5000 last",
        "evaluation accuracy": "0.25 last",
        "evaluation loss, code": "7.0000 best (step 5), nan last",
        "tokens": "1,000",
        "tokens per second": "1,006 median",
        "seconds per step": "0.55 median",
        "waiting for data": "4.5% of the step time",
        "restarts": "1",
        "saves": "2, 1 s median, 1.5 s longest",
        "profiled": "steps 7 to 9",
        "updates skipped": "1",
        "code": "0123456789ab with uncommitted changes",
        "ended": "interrupted (exit code 130)",
    }


def test_the_command_prints_the_summary_and_draws_into_the_run(run_dir, capsys):
    assert report.main([str(run_dir)]) == EXIT_COMPLETE
    printed = capsys.readouterr().out
    assert "my-run" in printed
    assert "10 of 12" in printed
    assert str(run_dir / "loss.png") in printed
    height, width, _ = imread(run_dir / "loss.png").shape
    assert (width, height) == (1800, 1320)


def test_output_names_the_picture(run_dir, tmp_path):
    assert report.main([str(run_dir), "--output", str(tmp_path / "other.png")]) == EXIT_COMPLETE
    assert (tmp_path / "other.png").exists()
    assert not (run_dir / "loss.png").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.mkdir(), "no run here"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").touch()), "not finished a step yet"),
    ],
)
def test_a_missing_foreign_or_empty_run_is_one_clear_line(tmp_path, capsys, make, says):
    path = tmp_path / "elsewhere"
    make(path)
    assert report.main([str(path)]) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {path}: ")
    assert says in captured.err
    assert captured.out == ""


def test_a_wrong_command_line_is_one_clear_line(capsys):
    assert report.main(["a", "b"]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith("error: python -m jaxtrain.report: unrecognized arguments: b")


def test_an_interrupt_is_one_line_and_exit_code_130(run_dir, monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "read_run", interrupted)
    assert report.main([str(run_dir)]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_a_full_terminal_ends_nothing(run_dir):
    command = f"{sys.executable} -m jaxtrain.report {run_dir} > /dev/full"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (EXIT_COMPLETE, "")


def test_a_picture_that_cannot_be_written_is_one_clear_line(run_dir, capsys):
    for name in ("missing/picture.png", "picture.docx"):
        picture = run_dir / name
        assert report.main([str(run_dir), "--output", str(picture)]) == EXIT_BAD_INPUT
        assert capsys.readouterr().err.startswith(f"error: {picture}: the picture can't be written")


def test_on_a_full_disk_the_picture_before_stays(run_dir, capsys, monkeypatch):
    (run_dir / "loss.png").write_bytes(b"before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert report.main([str(run_dir)]) == EXIT_BAD_INPUT
    assert "No space left on device" in capsys.readouterr().err
    assert (run_dir / "loss.png").read_bytes() == b"before"
    assert not list(run_dir.glob("*.tmp")) + list(run_dir.glob(".*.tmp"))


def test_a_picture_goes_where_it_is_said_to_be(run_dir, tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    for name in ("plain", "link.png"):
        assert report.main([str(run_dir), "--output", str(tmp_path / name)]) == EXIT_COMPLETE
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "real.png").read_bytes()
    assert (tmp_path / "link.png").is_symlink()
    assert report.main([str(run_dir), "--output", "/dev/null"]) == EXIT_COMPLETE


@pytest.mark.parametrize(("name", "says"), [("config.yml", "not YAML"), ("run.json", "not JSON: .* line 1")])
def test_a_broken_file_is_named(run_dir, name, says):
    (run_dir / name).write_text("{[\n")
    with pytest.raises(ConfigError, match=says) as caught:
        read_run(run_dir)
    assert str(caught.value).startswith(str(run_dir / name))


def test_metrics_alone_are_enough(run_dir, tmp_path):
    bare = tmp_path / "bare"
    with MetricsWriter(bare / "metrics.jsonl", 0) as metrics:
        metrics.write(step=1, loss=2.0)
    assert report.main([str(bare)]) == EXIT_COMPLETE
    assert report.summary(read_run(bare)) == {
        "steps": "1",
        "training loss": "2.0000 first, 2.0000 last",
        "ended": "unknown (events.jsonl tells of no start)",
    }


def test_a_start_after_the_last_stop_is_not_yet_ended(run_dir):
    with EventLog(run_dir / "events.jsonl") as events:
        events.write("start", step=10)
    assert report.how_it_ended(read_run(run_dir)) == "still running, or killed without a word"


def test_steps_left_open_by_the_config_are_those_that_the_start_told(run_dir):
    (run_dir / "config.yml").write_text("steps: null\n")
    assert read_run(run_dir).planned == 12


def test_starts_of_other_processes_are_no_restarts(run_dir):
    with EventLog(run_dir / "events.jsonl", process=1) as events:
        events.write("start", step=10)
    assert read_run(run_dir).restarts == [4]


def test_a_start_that_found_the_run_complete_is_no_restart(run_dir):
    with EventLog(run_dir / "events.jsonl") as events:
        events.write("start", step=12)
        events.write("stop", step=12, reason="already complete", exit_code=EXIT_COMPLETE)
    run = read_run(run_dir)
    assert run.restarts == [4]
    assert report.how_it_ended(run) == "already complete (exit code 0)"


def test_an_evaluation_repeated_after_a_restart_counts_once(run_dir):
    with MetricsWriter(run_dir / "metrics.jsonl", 10) as metrics:
        metrics.write(step=10, eval_loss=7.0)
    run = read_run(run_dir)
    assert [(line["step"], line["eval_loss"]) for line in run.evaluations] == [(5, 8.0), (10, 7.0)]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("eval_loss", "evaluation loss"),
        ("eval_code_loss", "evaluation loss, code"),
        ("eval_word_errors", "evaluation word errors"),
    ],
)
def test_an_evaluation_is_named_by_its_metric_and_its_set(name, title):
    assert evaluation_title(name) == title


def figures(run_dir, monkeypatch, tmp_path):
    """The figures that `draw` saves, by the names of their files."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: saved.append(figure))
    pictures = report.draw(read_run(run_dir), tmp_path / "picture.png")
    return dict(zip([picture.name for picture in pictures], saved, strict=True))


def drawn(run_dir, monkeypatch, tmp_path):
    """The figure of the losses."""
    return figures(run_dir, monkeypatch, tmp_path)["picture.png"]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_picture_shows_losses_evaluations_restarts_and_the_learning_rate(run_dir, monkeypatch, tmp_path):
    losses, rate, speed = drawn(run_dir, monkeypatch, tmp_path).axes
    labels = {line.get_label(): line for line in losses.lines}
    assert list(labels["training, each step"].get_ydata()) == pytest.approx([10 - step / 10 for step in range(1, 11)])
    assert list(labels["evaluation"].get_xdata()) == [5, 10]
    assert list(labels["evaluation, code"].get_xdata()) == [5]
    assert "restart at 4" in texts(losses)
    assert losses.get_ylabel() == "loss (nats)"
    assert losses.get_yscale() == "linear"
    assert list(rate.lines[0].get_ydata()) == [1e-3] * 10
    assert list(speed.lines[0].get_ydata()) == list(range(1001, 1011))
    assert speed.get_xlabel() == "step (optimizer updates)"


def test_many_restarts_are_marked_but_named_once(run_dir, monkeypatch, tmp_path):
    with EventLog(run_dir / "events.jsonl") as events:
        for step in (5, 6, 6, 7, 8, 9):
            events.write("start", step=step)
    losses, *_ = drawn(run_dir, monkeypatch, tmp_path).axes
    assert texts(losses) == ["first of 7 restarts"]
    marks = [line.get_xdata()[0] for line in losses.lines if list(line.get_ydata()) == [0, 1]]
    assert marks == [4, 5, 6, 6, 7, 8, 9]


def test_a_spike_is_cut_off_and_the_picture_says_so(run_dir, monkeypatch, tmp_path):
    with MetricsWriter(run_dir / "metrics.jsonl", 10) as metrics:
        write_step(metrics, 11, loss=4e5)
        write_step(metrics, 12, loss=math.nan)
        for step in range(13, 17):
            write_step(metrics, step)
    losses, *_ = drawn(run_dir, monkeypatch, tmp_path).axes
    bottom, top = losses.get_ylim()
    assert 8 < bottom < 8.4 < 9.9 < top < 20
    assert "losses up to 4e+05 are cut off" in texts(losses)


def test_a_fast_fall_from_the_first_loss_is_no_spike(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path / "metrics.jsonl", 0) as metrics:
        for step, loss in enumerate([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], start=1):
            metrics.write(step=step, loss=loss)
    (losses,) = drawn(tmp_path, monkeypatch, tmp_path).axes
    assert losses.get_ylim()[1] > 9.0
    assert texts(losses) == []


def norms_of(step, **changed):
    """Two layers of two stacked parameters, and a table beside them."""
    gradient = {"embed.table": 0.5, "layers.down": [3.0, 30.0 * step], "layers.up": [4.0, 40.0 * step]}
    ones = {"embed.table": 1.0, "layers.down": [0.6, 0.6], "layers.up": [0.8, 0.8]}
    tenth = {"embed.table": 0.1, "layers.down": [0.06, 0.06], "layers.up": [0.08, 0.08]}
    return as_json({"gradient_norm": gradient, "parameter_norm": ones, "update_norm": tenth} | changed)


def write_norms(run_dir, steps, **changed):
    with MetricsWriter(run_dir / "norms.jsonl", 0) as norms:
        for step in steps:
            norms.write(step=step, **norms_of(step, **changed))


def heat(axes):
    """Rows by name, with the colours' values in the order of the columns."""
    (mesh,) = axes.collections
    rows = mesh.get_array().reshape(len(axes.get_yticks()), -1)
    return dict(zip([label.get_text() for label in axes.get_yticklabels()], rows.tolist(), strict=True))


def test_norms_are_drawn_layer_by_step(run_dir, monkeypatch, tmp_path):
    write_norms(run_dir, [2, 4, 8])
    gradient, ratio, *_ = figures(run_dir, monkeypatch, tmp_path)["picture-norms.png"].axes
    assert heat(gradient) == {"layers 0": [5.0] * 3, "layers 1": [100.0, 200.0, 400.0], "embed": [0.5] * 3}
    assert {name: pytest.approx([0.1] * 3) for name in ("layers 0", "layers 1", "embed")} == heat(ratio)
    assert sorted({*gradient.collections[0].get_coordinates()[0, :, 0]}) == [0, 2, 4, 8]


def test_norms_that_are_not_finite_or_zero_have_no_colour(run_dir, monkeypatch, tmp_path):
    still = {"embed.table": 0.0, "layers.down": [0.0, 0.0], "layers.up": [0.0, math.inf]}
    write_norms(run_dir, [2, 4], gradient_norm=still, parameter_norm=still)
    gradient, ratio, *_ = figures(run_dir, monkeypatch, tmp_path)["picture-norms.png"].axes
    assert not gradient.collections
    assert not ratio.collections
    assert (gradient.get_ylabel(), ratio.get_ylabel()) == ("gradient norm: none", "update / parameter: none")


def test_a_long_run_has_columns_with_the_largest_norms(run_dir, monkeypatch, tmp_path):
    spike = {"embed.table": 9.0, "layers.down": [1.0], "layers.up": [1.0]}
    write_norms(run_dir, range(1, 1001))
    with MetricsWriter(run_dir / "norms.jsonl", 1000) as norms:
        norms.write(step=1001, **norms_of(1001, gradient_norm=spike))
        for step in range(1002, 2001):
            norms.write(step=step, **norms_of(1))
    gradient, *_ = figures(run_dir, monkeypatch, tmp_path)["picture-norms.png"].axes
    embed = heat(gradient)["embed"]
    assert len(embed) == 400
    assert embed.count(9.0) == 1
    assert embed.count(0.5) == 399


def test_the_command_draws_norms_into_the_run(run_dir, capsys):
    write_norms(run_dir, [2, 4])
    (run_dir / "norms.jsonl").open("a").write('{"step": 6}\n')
    assert report.main([str(run_dir)]) == EXIT_COMPLETE
    assert str(run_dir / "norms.png") in capsys.readouterr().out
    assert (run_dir / "norms.png").exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("losses", [[math.nan], [math.nan, math.inf], [2.0], [0.0, 0.0]])
def test_any_losses_can_be_drawn(tmp_path, losses):
    with MetricsWriter(tmp_path / "metrics.jsonl", 0) as metrics:
        for step, loss in enumerate(losses, start=1):
            metrics.write(step=step, loss=loss, learning_rate=1e-3)
        metrics.write(step=1, eval_loss=math.nan)
    assert report.main([str(tmp_path)]) == EXIT_COMPLETE
    assert (tmp_path / "loss.png").exists()


def test_the_running_median_passes_over_outliers_and_nan():
    values = np.full(200, 3.0)
    values[50], values[120] = 1e9, np.nan
    centres, medians = running_median(values)
    assert list(centres) == list(range(200))
    assert list(medians) == [3.0] * 200


def test_the_running_median_of_a_long_curve_has_few_points_and_both_ends():
    centres, medians = running_median(np.arange(100_000.0), points=50)
    assert len(centres) == len(medians) == 50
    assert (centres[0], centres[-1]) == (0, 99_999)
    assert medians[25] == centres[25]


def test_the_report_needs_no_jax():
    program = "import sys, jaxtrain.report; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def write_timeline(run_dir, ranks, probes=None):
    """Steps 1 to 20 of each rank, which spent (data, host, device) seconds on each."""
    for rank, parts in enumerate(ranks):
        timeline = Timeline(run_dir / "timeline", rank, len(ranks), after=0)
        for step in range(1, 21):
            for part, seconds in zip(("data", "device"), (parts[0], parts[2]), strict=True):
                timeline.add(part, seconds)
            if probes is not None and step % 5 == 0:
                timeline.probed(probes[rank])
            timeline.step(step, sum(parts))
        timeline.close()


def test_the_timeline_is_drawn_rank_by_step_and_names_who_is_behind(run_dir, monkeypatch, tmp_path):
    ranks = [(0.0, 0.1, 0.9), (0.4, 0.1, 0.5), (0.0, 0.5, 0.5)]
    write_timeline(run_dir, ranks, probes=[0.013, 0.01, 0.01])
    rows = report.summary(read_run(run_dir))
    assert re.fullmatch(r"rank 1 \(.+\), 40% of the time", rows["waits longest for data"])
    assert re.fullmatch(r"rank 2 \(.+\), 50% of the time", rows["busiest itself"])
    assert re.fullmatch(r"rank 0 \(.+\), its probe takes 30% longer", rows["slowest device"])
    panels = figures(run_dir, monkeypatch, tmp_path)["picture-timeline.png"].axes
    titled = {axes.get_title(loc="left"): axes for axes in panels if axes.collections and axes.get_title(loc="left")}
    for part, title in enumerate(["waiting for data", "its own work", "waiting for devices"]):
        assert [values[0] for values in heat(titled[title]).values()] == pytest.approx([rank[part] for rank in ranks])
    assert [values[0] for values in heat(titled["probe of the devices, over the median"]).values()] == pytest.approx(
        [0.3, 0, 0]
    )


def test_of_many_ranks_those_that_differ_most_are_drawn(run_dir, monkeypatch, tmp_path):
    ranks = [(0.0, 0.1, 0.9)] * 50
    ranks[40], ranks[41] = (0.4, 0.1, 0.5), (0.0, 0.5, 0.5)
    write_timeline(run_dir, ranks, probes=[0.01] * 45 + [0.013] + [0.01] * 4)
    first, *_ = figures(run_dir, monkeypatch, tmp_path)["picture-timeline.png"].axes
    assert {"40", "41", "45"} <= set(heat(first))
    assert len(heat(first)) == 24


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ranks", [1, 200])
def test_a_timeline_of_any_number_of_ranks_can_be_drawn(run_dir, ranks):
    write_timeline(run_dir, [(0.0, 0.1, 0.9)] * ranks)
    assert report.main([str(run_dir)]) == EXIT_COMPLETE
    assert (run_dir / "timeline.png").exists()
    assert {"slowest device", "busiest itself", "waits longest for data"}.isdisjoint(report.summary(read_run(run_dir)))


def test_what_was_found_about_health_is_told(run_dir):
    with EventLog(run_dir / "events.jsonl") as events:
        for device in ("cuda:3", "cuda:4"):
            events.write("health", rank=1, device=device, what="slow", detail=f"rank 1 (node7): {device} is slow")
    rows = report.summary(read_run(run_dir))
    assert (rows["health"], rows["health, 2"]) == ("rank 1 (node7): cuda:3 is slow", "rank 1 (node7): cuda:4 is slow")


def test_lines_that_are_of_no_run_are_passed_over(run_dir):
    expected = report.summary(read_run(run_dir))
    lines = (
        '{"step": "x", "loss": 1}',
        '{"step": [1], "loss": 1}',
        '{"step": 50, "loss": "y"}',
        '{"step": 1, "gradient_norm": 3, "parameter_norm": [], "update_norm": {"a": "x"}}',
        '{"step": 1, "gradient_norm": {}, "parameter_norm": {"a": []}, "update_norm": {}}',
        '{"step": "x", "data": 1, "host": 1, "device": 1}',
        '{"step": 1, "data": "x", "host": null, "device": 1}',
        "[]",
    )
    (run_dir / "timeline").mkdir()
    for name in ("metrics.jsonl", "events.jsonl", "norms.jsonl", "timeline/rank-0.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write("\n".join(lines) + "\n")
    (run_dir / "config.yml").write_text("steps: many\n")
    replace_json(run_dir / "run.json", {"git": {"branch": "main"}})
    found = read_run(run_dir)
    assert report.summary(found).items() <= expected.items()
    assert (found.norms, found.timeline) == ([], {})


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.yml", "run.json"])
def test_a_file_of_a_run_that_cannot_be_read_is_named(name, run_dir):
    (run_dir / name).unlink()
    (run_dir / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name}: Is a directory"):
        read_run(run_dir)


def test_a_description_that_is_no_text_is_named(run_dir):
    (run_dir / "run.json").write_bytes(b"{\xff")
    with pytest.raises(ConfigError, match=r"run\.json: not JSON"):
        read_run(run_dir)
