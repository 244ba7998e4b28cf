"""Sizes and work of the shipped configurations, without allocating any of them."""

from pathlib import Path

import jax
import pytest

from jaxtrain.config import DecoderConfig, load
from jaxtrain.models.families import make_task
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import ParameterInfo, Role, count_parameters, describe, named_leaves
from tests.sizes import PARAMETERS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EVERYTHING = DecoderConfig(
    vocab=64, layers=3, embed=32, heads=4, kv_heads=2, mlp=48, bias="all", qk_norm=True, head_dim=10
)


def infos_of(task: LanguageTask) -> dict[str, ParameterInfo]:
    return dict(named_leaves(describe(jax.eval_shape(task.init, jax.random.key(0)))))


def test_every_shipped_configuration_is_counted() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_configuration_has_the_published_number_of_parameters(name: str) -> None:
    config = load(CONFIGS / f"{name}.yml")
    assert count_parameters(infos_of(make_task(config))) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in (CONFIGS / f"{name}.yml").read_text()


def test_every_parameter_has_the_names_of_its_dimensions_and_a_role() -> None:
    sizes = {"vocab": 64, "layers": 3, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 10, "mlp": 48}
    roles: dict[str, Role] = {"bias": "bias", "scale": "norm", "table": "embedding", "projection": "head"}
    infos = infos_of(LanguageTask(EVERYTHING, 16))
    assert len(infos) == 21
    for name, info in infos.items():
        for axis, size in zip(info.axes, info.shape, strict=True):
            assert size in ({32, 10} if axis == "norm" else {sizes[str(axis)]}), name
        assert info.role == next((role for end, role in roles.items() if name.endswith(end)), "matrix"), name
        assert ("layers" in info.axes) == name.startswith("layers."), name


@pytest.mark.parametrize("tied", [False, True])
def test_shrinking_keeps_the_names_axes_and_roles_of_every_parameter(tied: bool) -> None:
    task = LanguageTask(EVERYTHING.model_copy(update={"tied_embeddings": tied, "window": 5}), 16)
    small = task.shrunk()
    large, shrunk = infos_of(task), infos_of(small)
    assert {name: (info.axes, info.role) for name, info in large.items()} == {
        name: (info.axes, info.role) for name, info in shrunk.items()
    }
    assert small.config.heads // small.config.resolved_kv_heads == 2
    assert small.config.window is not None


@pytest.mark.parametrize("name", ["mistral-7b", "llama3-70b"])
def test_a_shrunk_model_is_small_enough_for_one_core(name: str) -> None:
    task = make_task(load(CONFIGS / f"{name}.yml"))
    assert isinstance(task, LanguageTask)
    assert count_parameters(infos_of(task.shrunk())) < 10_000_000


def test_flops_equal_a_count_by_hand() -> None:
    rows, length = 3, 5
    config = DecoderConfig(vocab=64, layers=2, embed=16, heads=4, kv_heads=2, head_dim=6, mlp=24)
    query_and_output, key_and_value = 2 * (16 * 4 * 6), 2 * (16 * 2 * 6)
    per_token = 2 * (query_and_output + key_and_value + 3 * 16 * 24) + 16 * 64
    visible_pairs = 1 + 2 + 3 + 4 + 5
    attention = rows * 2 * visible_pairs * 4 * (2 * 6 + 2 * 6)
    flops = LanguageTask(config, length).flops(rows)
    assert flops.attention == attention
    assert flops.forward == 2 * per_token * rows * length + attention
    assert flops.training == 3 * flops.forward


def test_a_window_lowers_the_count_to_the_pairs_that_are_seen() -> None:
    config = DecoderConfig(vocab=64, layers=1, embed=16, heads=4, mlp=24, window=3)
    pairs = 1 + 2 + 3 + 3 + 3
    assert LanguageTask(config, 5).flops(1).attention == pairs * 4 * 16
