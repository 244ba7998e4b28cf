"""The config with which a saved run is read elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxtrain.config import PipelineConfig
from jaxtrain.saved_run import config_of
from tests.runs import INTERLEAVED, tiny_config


def test_a_run_of_two_chunks_is_read_on_as_many_stages_as_it_has_layers(tmp_path: Path) -> None:
    run = tiny_config(tmp_path, tmp_path / "data", "mesh.pipeline=2", *INTERLEAVED, "model.layers=4", "microbatch=1")
    saved: Any = SimpleNamespace(path=run.run_dir, meta=SimpleNamespace(config=run.to_dict()))
    config = config_of(saved, ["mesh.pipeline=4"])
    assert config.mesh.pipeline == 4
    assert config.pipeline == PipelineConfig()
