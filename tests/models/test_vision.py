"""The vision transformer: patches, moved images, its loss and accuracy, its sizes and work counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import VitConfig
from jaxtrain.models.parameters import count_parameters, describe, named_leaves, unbox
from jaxtrain.models.vision import VisionTask, cut_into_patches, shift_images
from jaxtrain.ops.full_attention import full_attention

CONFIG = VitConfig(
    family="vit", image=6, channels=2, patch=3, classes=5, layers=3, embed=24, heads=2, mlp=40, initial_scale=0.3
)
KEY = jax.random.key(0)


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(1).random((rows, 6, 6, 2)).astype(np.float32)


def batch(rows: int, weights: Any = 1.0) -> dict[str, jax.Array]:
    label = np.random.default_rng(2).integers(0, 5, rows)
    return {
        "image": jnp.asarray(images(rows)),
        "label": jnp.asarray(label, jnp.int32),
        "weights": jnp.broadcast_to(jnp.float32(weights), (rows,)),
        "row": jnp.arange(rows, dtype=jnp.int32),
    }


@pytest.fixture(scope="module")
def params() -> Any:
    return unbox(VisionTask(CONFIG).init(KEY))


def logits(params: Any, row: dict[str, jax.Array]) -> np.ndarray:
    """log p of each class for one image, from the loss of each label."""
    task = VisionTask(CONFIG)
    found = [task.metrics(params, {**row, "label": jnp.array([label])})["loss"].total for label in range(5)]
    return -np.array(found, np.float64)


def test_patches_are_cut_row_by_row_with_their_pixels_row_by_row() -> None:
    picture = np.arange(36.0).reshape(1, 6, 6, 1)
    patches = np.asarray(cut_into_patches(jnp.asarray(picture), 3))
    assert patches.shape == (1, 4, 9)
    assert patches[0, 1].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert patches[0, 2].tolist() == [18, 19, 20, 24, 25, 26, 30, 31, 32]


def moved(picture: np.ndarray, down: int, right: int) -> np.ndarray:
    result = np.zeros_like(picture)
    height, width, _ = picture.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[y, x] = picture[y - down, x - right]
    return result


def test_an_image_is_moved_by_up_to_so_many_pixels_in_all_ways_and_nothing_else_happens() -> None:
    pictures = images(200)
    shifted = np.asarray(shift_images(jnp.asarray(pictures), 1, KEY, 7, jnp.arange(200)))
    pairs = list(zip(pictures, shifted, strict=True))
    ways = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    found = [[way for way in ways if (moved(picture, *way) == new).all()] for picture, new in pairs]
    assert all(len(matching) == 1 for matching in found)
    counts = [sum(matching == [way] for matching in found) for way in ways]
    assert min(counts) > 8, "each way is as likely: 200 / 9 = 22"


def test_how_an_image_is_moved_is_a_function_of_key_site_and_global_row() -> None:
    same = jnp.broadcast_to(jnp.asarray(images(1)), (64, 6, 6, 2))
    whole = shift_images(same, 2, KEY, 7, jnp.arange(64))
    some = jnp.array([40, 3, 17])
    np.testing.assert_array_equal(shift_images(same[:3], 2, KEY, 7, some), whole[some])
    for key, site in [(jax.random.key(1), 7), (KEY, 8)]:
        assert (shift_images(same, 2, key, site, jnp.arange(64)) != whole).any()
    assert shift_images(same, 0, KEY, 7, jnp.arange(64)) is same


def test_full_attention_is_the_softmax_over_all_positions() -> None:
    q, k, v = (np.random.default_rng(seed).standard_normal((2, 5, 3, 4)).astype(np.float32) for seed in range(3))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) / 2
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhd->bqhd", weights, v)
    np.testing.assert_allclose(
        full_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)), want, rtol=1e-5, atol=1e-6
    )


def test_where_a_patch_stands_matters_and_not_only_what_it_shows(params: Any) -> None:
    row = batch(1)
    swapped = {**row, "image": jnp.roll(row["image"], 3, axis=1)}
    assert np.abs(logits(params, row) - logits(params, swapped)).max() > 1e-3


def test_the_loss_is_the_sum_over_rows_by_their_weights_and_fillers_add_nothing(params: Any) -> None:
    task, weights = VisionTask(CONFIG), np.array([1, 0, 0.5, 1], np.float32)
    together = task.losses(params, batch(4, weights), KEY)["cross_entropy"]
    rows = batch(4)
    alone = [
        float(task.losses(params, {name: array[i : i + 1] for name, array in rows.items()}, KEY)["cross_entropy"])
        for i in range(4)
    ]
    assert float(together) == pytest.approx(float(np.dot(weights, alone)), rel=1e-5)
    assert float(task.denominators(batch(4, weights))["cross_entropy"]) == 2.5
    assert float(task.denominators(batch(4, 0.0))["cross_entropy"]) == 1
    assert int(task.counted(batch(4, weights))) == 3


def test_accuracy_and_loss_of_an_evaluation_are_those_of_each_image(params: Any) -> None:
    weights = np.array([1, 1, 0, 1, 1, 1, 1, 1], np.float32)
    found = {name: metric.result() for name, metric in VisionTask(CONFIG).metrics(params, batch(8, weights)).items()}
    rows = batch(8)
    each = np.array([logits(params, {name: array[i : i + 1] for name, array in rows.items()}) for i in range(8)])
    label, counted = np.asarray(rows["label"]), weights > 0
    assert np.exp(each).sum(1) == pytest.approx(np.ones(8), rel=1e-5)
    assert found["accuracy"] == pytest.approx((each.argmax(1) == label)[counted].mean())
    assert found["loss"] == pytest.approx(-each[np.arange(8), label][counted].mean(), rel=1e-5)


def test_dropout_and_movement_are_for_training_only(params: Any) -> None:
    task = VisionTask(CONFIG.model_copy(update={"dropout": 0.5, "shift": 1}))
    rows = batch(4)
    plain = float(VisionTask(CONFIG).metrics(params, rows)["loss"].total)
    assert float(task.metrics(params, rows)["loss"].total) == plain
    first, again, other = (
        float(task.losses(params, rows, jax.random.key(seed))["cross_entropy"]) for seed in (1, 1, 2)
    )
    assert first == again
    assert len({plain, first, other}) == 3


def infos_of(task: VisionTask) -> dict[str, Any]:
    return dict(named_leaves(describe(jax.eval_shape(task.init, KEY))))


def test_parameters_and_their_names_equal_a_count_by_hand() -> None:
    infos = infos_of(VisionTask(CONFIG))
    attention, mlp, norms = 4 * 24 * 24, 2 * 24 * 40, 2 * 24
    embedding, head = (3 * 3 * 2) * 24 + 4 * 24, 24 + 24 * 5
    assert count_parameters(infos) == 3 * (attention + mlp + norms) + embedding + head
    sizes = {"layers": 3, "embed": 24, "heads": 2, "head_dim": 12, "mlp": 40, "norm": 24}
    for name, info in infos.items():
        for axis, size in zip(info.axes, info.shape, strict=True):
            assert axis is None or size == sizes[axis], name
        assert ("layers" in info.axes) == name.startswith("layers."), name
    roles = {name: info.role for name, info in infos.items() if info.role != "matrix"}
    norms_of = dict.fromkeys(("layers.attention_norm.scale", "layers.mlp_norm.scale", "head.norm.scale"), "norm")
    assert roles == {**norms_of, "embed.positions": "embedding", "head.projection": "head"}


def test_flops_equal_a_count_by_hand() -> None:
    rows, patches = 7, 4
    per_patch = 2 * (3 * 3 * 2) * 24 + 3 * 2 * (4 * 24 * 24 + 2 * 24 * 40)
    scores_and_values = 3 * 2 * (2 * patches * patches * 24)
    flops = VisionTask(CONFIG).flops(rows)
    assert flops.attention == rows * scores_and_values
    assert flops.forward == rows * (patches * per_patch + scores_and_values + 2 * 24 * 5)


def test_shrinking_keeps_the_names_axes_and_roles_of_every_parameter() -> None:
    task = VisionTask(
        VitConfig(family="vit", image=224, channels=3, patch=16, classes=1000, layers=12, embed=768, heads=12)
    )
    small = task.shrunk()
    large, shrunk = infos_of(task), infos_of(small)
    assert {name: (info.axes, info.role) for name, info in large.items()} == {
        name: (info.axes, info.role) for name, info in shrunk.items()
    }
    assert count_parameters(shrunk) < 400_000
    assert small.config.image % small.config.patch == 0


def test_the_embedding_says_where_what_is_seen_stands_at_the_same_scale(params: Any) -> None:
    """Otherwise the layers begin with a bag of patches and learn ten times slower."""
    embed = params["embed"]
    seen = np.asarray(cut_into_patches(jnp.asarray(images(50)), 3) @ embed["projection"]).std()
    assert 0.2 < np.asarray(embed["positions"]).std() / seen < 5
