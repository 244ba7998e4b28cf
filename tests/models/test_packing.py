"""Documents that share a row don't see each other, neither their tokens nor their positions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import DecoderConfig
from jaxtrain.data import RowTable
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import unbox
from jaxtrain.models.task import run_layers
from jaxtrain.sharding import use_layout
from jaxtrain.step import with_rows
from tests.factories import make_dataset
from tests.runs import make_layout

SEQUENCE = 32
TASK = LanguageTask(
    DecoderConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, mlp=128, initial_scale=0.1), SEQUENCE
)


def packed_batch(tokens: np.ndarray, first: int) -> dict[str, jax.Array]:
    """Rows of two documents, of which the first has `first` tokens."""
    position = np.arange(SEQUENCE)
    segments = np.broadcast_to(1 + (position >= first), tokens.shape)
    positions = np.broadcast_to(np.where(position >= first, position - first, position), tokens.shape)
    weights = np.ones(tokens.shape, np.float32)
    batch = {"tokens": tokens, "targets": tokens, "segments": segments, "positions": positions, "weights": weights}
    return with_rows({name: jnp.asarray(array) for name, array in batch.items()})


@pytest.mark.parametrize(
    ("axes", "tolerance"),
    [({}, 0.0), ({"tensor": 2}, 1e-6), ({"fsdp": 8}, 1e-6)],
    ids=["one device", "tensor=2", "fsdp=8"],
)
def test_the_tokens_of_one_document_never_reach_another_in_the_same_row(axes: dict[str, int], tolerance: float) -> None:
    params = unbox(TASK.init(jax.random.key(0)))

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        batch = packed_batch(tokens, 20)
        carry, _ = run_layers(TASK, params, TASK.embed(params, batch, None), TASK.context(batch), None)
        return carry @ params["head"]["projection"]

    tokens = np.random.default_rng(0).integers(1, 256, (8, SEQUENCE))
    changed = tokens.copy()
    changed[:, :20] = (tokens[:, :20] + 100) % 256
    with use_layout(make_layout(**axes)):
        before, after = np.asarray(logits(tokens)), np.asarray(logits(changed))
    assert np.abs(before[:, :20] - after[:, :20]).max() > 0.1
    assert np.abs(before[:, 20:] - after[:, 20:]).max() <= tolerance


def test_the_loss_of_packed_documents_equals_that_of_documents_in_rows_of_their_own(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(1, 256, length).tolist() for length in (21, 13, 5, 29)]
    dataset = make_dataset(tmp_path, documents)
    params = unbox(TASK.init(jax.random.key(0)))

    def losses(packed: bool) -> list[float]:
        table = RowTable(dataset, "train", SEQUENCE, packed, vocab=256)
        batch = with_rows({key: jnp.asarray(a) for key, a in table.assemble(np.arange(len(table))).items()})

        def of_document(weights: jax.Array) -> jax.Array:
            return TASK.losses(params, {**batch, "weights": weights}, jax.random.key(0))["cross_entropy"]

        masks = [_mask_of(batch, document) for document in documents]
        return jax.jit(lambda masks: jax.lax.map(of_document, masks))(jnp.stack(masks)).tolist()

    assert losses(packed=True) == pytest.approx(losses(packed=False), rel=1e-5)


def _mask_of(batch: dict[str, jax.Array], document: list[int]) -> jax.Array:
    """1 at the inputs of this document, found by its tokens."""
    tokens, segments = np.asarray(batch["tokens"]), np.asarray(batch["segments"])
    inputs = document[:-1]
    mask = np.zeros(tokens.shape, np.float32)
    for row in range(len(tokens)):
        for start in range(SEQUENCE - len(inputs) + 1):
            place = slice(start, start + len(inputs))
            if tokens[row, place].tolist() == inputs:
                assert len(set(segments[row, place].tolist())) == 1
                mask[row, place] = 1
    assert mask.sum() == len(inputs)
    return jnp.asarray(mask)
