"""From a config to a pipeline, or to an error that names what must change."""

from pathlib import Path

import jax
import pytest

from jaxtrain.config import Config
from jaxtrain.errors import ConfigError
from jaxtrain.pipeline.build import describe_pipeline, make_pipeline, make_stages
from jaxtrain.program import build
from tests.pipeline.staged import Balanced
from tests.runs import FAMILIES, tiny_config


def config_of(folder: Path, *overrides: str) -> Config:
    return tiny_config(folder, folder / "data", "mesh.pipeline=2", "mesh.data=1", *overrides)


def test_a_task_that_is_not_cut_into_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh.pipeline=2, but a Regression isn't cut into layers;.*mesh.pipeline=1"):
        build(config_of(tmp_path, *FAMILIES["own"]), jax.devices()[:2])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.layers=1"], ["model.layers=1", "mesh.pipeline=2", "at most 1"]),
        (
            ["pipeline={schedule: interleaved_1f1b, chunks: 2}", "model.layers=3"],
            ["model.layers=3", "mesh.pipeline=2 × pipeline.chunks=2", "at most 3"],
        ),
        (["pipeline.chunks=2"], ["pipeline.chunks=2", "pipeline.schedule=1f1b", "interleaved_1f1b"]),
        (["model.embed=36", "model.head_dim=10", "mesh.fsdp=4"], ["model.embed=36", "mesh.fsdp=4 × mesh.pipeline=2"]),
        (["microbatch=3"], ["microbatch=3", "8 examples", "1, 2, 4 or 8"]),
        (["eval.batch=3"], ["eval.batch=3", "mesh.pipeline=2"]),
    ],
)
def test_a_config_that_no_pipeline_fits_is_refused_by_its_keys(
    overrides: list[str], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_of(tmp_path, *overrides)
    for word in words:
        assert word in str(refusal.value)


def test_what_is_known_only_with_the_devices_is_refused_then(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path / "data", "mesh.pipeline=-1", "mesh.data=1")
    with pytest.raises(ConfigError, match=r"model.layers=2 are too few for mesh.pipeline=4"):
        build(config, jax.devices()[:4])


def test_somebodys_own_task_of_too_few_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh.pipeline=4.* virtual stages.*model.layers=3.*mesh.pipeline: 3"):
        make_stages(config_of(tmp_path), Balanced(3), 4)


def test_the_head_counts_as_load_of_the_last_stage(tmp_path: Path) -> None:
    """A vocabulary of 128 times the width costs more than the one layer of either stage."""
    config = config_of(tmp_path, "model.layers=8", "model.vocab=8192", "data.vocab=8192", "model.mlp=64")
    program = build(config, jax.devices()[:2])
    assert program.stages is not None
    (first,), (last,) = program.stages.split
    assert first + last == 8
    assert first > last
    assert program.stages.loads[1] > last / first * program.stages.loads[0]


def test_what_was_chosen_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, "pipeline={schedule: interleaved_1f1b, chunks: 2}", "model.layers=5")
    task = Balanced(5)
    stages = make_stages(config, task, 2)
    text = describe_pipeline(config, make_pipeline(config, task, stages, 4))
    assert text.startswith("interleaved_1f1b of 4 micro-batches over stages of 1+1 2+1 layers; stages idle")


def test_a_program_tells_its_pipeline_once_it_is_traced(tmp_path: Path) -> None:
    config = config_of(tmp_path, "microbatch=2")
    program = build(config, jax.devices()[:2])
    jax.eval_shape(program.train_step, program.state, program.batch, program.abstract_inputs())
    assert program.layout.choices["pipeline"].startswith("1f1b of 4 micro-batches over stages of 1 1 layers")


def test_without_a_pipeline_there_are_no_stages(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path / "data", "pipeline.schedule=gpipe")
    assert build(config, jax.devices()[:1]).stages is None
