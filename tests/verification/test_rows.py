"""The random rows of a trial are what the data of the config would be."""

import numpy as np
import pytest

from jaxtrain.config import load
from jaxtrain.models.families import make_task
from jaxtrain.verification.rows import random_rows
from jaxtrain.verification.shrink import shrunk
from tests.runs import ROOT

ROWS, COUNT = 8, 4


def batches(name: str, *overrides: str) -> list[dict[str, np.ndarray]]:
    config = shrunk(load(ROOT / "configs" / f"{name}.yml", list(overrides)))
    task = make_task(config)
    found = random_rows(config, task, ROWS, COUNT)
    for batch in found:
        specs = task.example_batch(ROWS)
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            name: (spec.shape, np.dtype(spec.dtype)) for name, spec in specs.items()
        }
    return found


@pytest.mark.parametrize("name", ["quickstart", "digits-vit"])
def test_some_rows_at_the_end_and_some_targets_are_not_counted(name: str) -> None:
    counted = [(batch["weights"].reshape(ROWS, -1) > 0).any(1) for batch in batches(name)]
    assert {int(rows.sum()) for rows in counted} - {ROWS}
    assert all(rows[0] for rows in counted)
    assert 0.4 < np.mean([(batch["weights"] > 0).mean() for batch in batches(name)]) < 1


def test_packed_rows_hold_several_documents_with_positions_of_their_own() -> None:
    for batch in batches("quickstart"):
        assert batch["segments"].max() > 1
        new = np.diff(batch["segments"], axis=1) == 1
        assert (batch["positions"][:, 1:][new] == 0).all()
        assert (np.diff(batch["positions"], axis=1)[~new] == 1).all()
        assert batch["tokens"].max() < 512
        assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()


def test_rows_that_are_not_packed_hold_one_document_and_padding() -> None:
    found = batches("quickstart", "data.pack=false")
    assert all(set(np.unique(batch["segments"])) == {0, 1} for batch in found)
    for batch in found:
        assert not batch["weights"][batch["segments"] == 0].any()
        assert not batch["tokens"][batch["segments"] == 0].any()
