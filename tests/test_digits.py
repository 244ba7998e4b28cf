"""The shipped ViT learns to read real handwriting, in the loop, from its config."""

from pathlib import Path

import pytest

from jaxtrain.config import load
from tests.runs import ROOT, run_here


@pytest.mark.slow
def test_the_shipped_vit_reads_97_of_100_held_out_digits(tmp_path: Path) -> None:
    config = load(ROOT / "configs" / "digits-vit.yml", [f"run_dir={tmp_path / 'run'}", "checkpoint.every=0"])
    last = run_here(config)[-1]
    assert last["step"] == config.steps
    assert last["eval_accuracy"] >= 0.97
