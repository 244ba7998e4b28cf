"""What one update is: its denominators, its gradient's norm, its clipping, its rate, and what it refuses to do."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import Config
from jaxtrain.data import FILLER, RowTable
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import named_leaves
from jaxtrain.models.task import run_layers
from jaxtrain.optimizer import schedule_inputs
from jaxtrain.placement import Placement
from jaxtrain.program import Program
from jaxtrain.step import clip_by_norm, initial_state, make_train_step, with_rows
from tests.factories import make_dataset, make_documents
from tests.runs import Trained, tiny_program, train_on

Batch = dict[str, np.ndarray]

COUNTED = (31, 31, 31, 31, 3, 3, 3, 3)
SGD = (
    "optimizer={name: sgd, learning_rate: 1.0, momentum: 0.0, clip: null, schedule: {kind: constant}}",
    "model.initial_scale=0.1",
)
SPLITS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device, 2 micro-batches": (1, ("microbatch=4",)),
    "one device, 4 micro-batches": (1, ("microbatch=2",)),
    "a row on each of eight devices": (8, ("mesh.data=8",)),
    "two data shards, 4 micro-batches each": (2, ("mesh.data=2", "microbatch=1")),
    "2×2×2, 2 micro-batches": (8, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "microbatch=1")),
}


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    """Three batches of rows with very different numbers of targets; in the second two rows are fillers."""
    documents = make_documents([count + 1 for count in COUNTED])
    dataset = make_dataset(tmp_path_factory.mktemp("ragged"), documents)
    table = RowTable(dataset, "train", sequence=32, packed=False, vocab=256)
    rows = np.arange(8)
    return [table.assemble(ids) for ids in (rows, np.where(rows % 3 == 1, FILLER, rows), rows[::-1])]


class Hashed:
    """Batches that a cache can have as a key: by identity."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches


@functools.cache
def _trained(devices: int, overrides: tuple[str, ...], data: "Hashed") -> Trained:
    return train_on(tiny_program(devices, *SGD, *overrides), data.batches)


@pytest.fixture(scope="module")
def data(ragged: list[Batch]) -> Hashed:
    return Hashed(ragged)


def initial_params(program: Program) -> Any:
    return jax.device_get(program.init(program.initial_key())["params"])


def test_the_loss_of_a_ragged_batch_is_the_mean_over_all_its_counted_tokens(data: Hashed) -> None:
    program, batch = tiny_program(1, *SGD), data.batches[0]
    task, params = program.task, initial_params(program)
    assert isinstance(task, LanguageTask)
    rows = with_rows(jax.tree.map(jnp.asarray, batch))
    carry, _ = run_layers(task, params, task.embed(params, rows, None), task.context(rows), None)
    norm = np.asarray(carry, np.float64)
    norm = norm / np.sqrt((norm**2).mean(-1, keepdims=True) + task.config.norm_epsilon)
    logits = norm @ params["head"]["projection"]
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    first = _trained(1, (), data).metrics[0]
    assert batch["weights"].sum(1).tolist() == list(COUNTED)
    assert first["tokens"] == 136
    assert first["loss"] == pytest.approx((nll * batch["weights"]).sum() / 136, rel=1e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_a_ragged_batch_trains_alike_however_it_is_split(split: str, data: Hashed) -> None:
    whole, parts = _trained(1, (), data), _trained(*SPLITS[split], data)
    for name in ("loss", "grad_norm", "tokens"):
        got, want = ([metrics[name] for metrics in run.metrics] for run in (parts, whole))
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
    for name, values in whole.parameters().items():
        np.testing.assert_allclose(parts.parameters()[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max())


@pytest.mark.parametrize("split", [None, *SPLITS])
def test_the_gradient_norm_is_the_norm_of_the_gathered_gradient(split: str | None, data: Hashed) -> None:
    devices, overrides = (1, ()) if split is None else SPLITS[split]
    program = tiny_program(devices, *SGD, *overrides)
    one = train_on(program, data.batches[:1])
    gradients = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), initial_params(program), one.state["params"])
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradients)))
    assert one.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert one.metrics[0]["grad_norm"] == pytest.approx(_trained(1, (), data).metrics[0]["grad_norm"], rel=1e-5)


def test_a_batch_without_any_counted_token_has_loss_zero_and_changes_nothing(data: Hashed) -> None:
    program = tiny_program(1, *SGD)
    nothing = {**data.batches[0], "weights": np.zeros((8, 32))}
    run = train_on(program, [nothing])
    assert (run.metrics[0]["loss"], run.metrics[0]["grad_norm"], run.metrics[0]["skipped"]) == (0.0, 0.0, False)
    for a, b in zip(jax.tree.leaves(initial_params(program)), jax.tree.leaves(run.state["params"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_gradient_is_clipped_once_after_accumulation(data: Hashed) -> None:
    clipped = tuple(override.replace("clip: null", "clip: 0.05") for override in SGD)
    moves = []
    for overrides in ((), ("microbatch=2",)):
        program = tiny_program(1, *clipped, *overrides)
        run = train_on(program, data.batches[:1])
        assert run.metrics[0]["grad_norm"] > 0.5
        assert run.metrics[0]["grad_norm"] == pytest.approx(_trained(1, (), data).metrics[0]["grad_norm"], rel=1e-5)
        moves.append(jax.tree.map(lambda a, b: np.float64(b) - a, initial_params(program), run.state["params"]))
    for move in moves:
        assert np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(move))) == pytest.approx(0.05, rel=1e-4)
    for a, b in zip(*(jax.tree.leaves(move) for move in moves), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def identical_rows(counted: int) -> Batch:
    """Eight equal rows of which only one counts."""
    tokens = np.tile(np.random.default_rng(0).integers(1, 256, 33), (8, 1))
    weights = (np.arange(8) == counted)[:, None] * np.ones((8, 32))
    positions = np.tile(np.arange(32), (8, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.ones((8, 32)),
        "positions": positions,
        "weights": weights,
    }


@pytest.mark.slow
def test_each_row_draws_its_own_dropout_mask_the_same_on_every_mesh() -> None:
    dropout = ("model.dropout=0.5", "model.initial_scale=0.1")
    meshes = {1: (), 8: ("mesh.data=8",), 2: ("mesh.tensor=2",)}
    losses = {
        devices: [train_on(tiny_program(devices, *dropout, *mesh), [identical_rows(row)]).losses[0] for row in range(8)]
        for devices, mesh in meshes.items()
    }
    assert len({round(loss, 6) for loss in losses[8]}) == 8
    assert losses[8] == pytest.approx(losses[1], rel=1e-5)
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)


def test_consecutive_steps_draw_different_dropout_masks_and_a_repeated_step_the_same() -> None:
    program = tiny_program(1, "model.dropout=0.5", "model.initial_scale=0.1")
    inputs = program.inputs(10)
    inputs["schedule"] = {**inputs["schedule"], "peak": jax.device_put(jnp.float32(0), program.layout.replicated())}
    batch = Placement(program.batch)(identical_rows(0))
    state, losses = program.init(program.initial_key()), []
    for _ in range(2):
        state, metrics = program.train_step(state, batch, inputs)
        losses.append(metrics["loss"].item())
    _, again = program.train_step(program.init(program.initial_key()), batch, inputs)
    assert losses[0] != losses[1]
    assert again["loss"].item() == losses[0]


def test_bfloat16_computation_keeps_parameters_and_moments_in_float32_and_learns(data: Hashed) -> None:
    program = tiny_program(8, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "precision=bfloat16")
    run = train_on(program, [data.batches[0]] * 8)
    adam = run.state["optimizer"]["adam"]
    for tree in (run.state["params"], adam.mu, adam.nu):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.float32)}
    assert run.losses[-1] < 0.8 * run.losses[0]
    exact = train_on(tiny_program(1), [data.batches[0]])
    assert run.losses[0] == pytest.approx(exact.losses[0], rel=1e-2)
    assert run.losses[0] != exact.losses[0]


@pytest.mark.parametrize(("devices", "mesh"), [(1, ()), (8, ("mesh.fsdp=8",))], ids=["one device", "fsdp=8"])
def test_a_non_finite_step_leaves_the_whole_state_bit_unchanged(
    devices: int, mesh: tuple[str, ...], data: Hashed
) -> None:
    program = tiny_program(devices, *mesh)
    before = train_on(program, data.batches[:2])
    kept = jax.device_get(before.state)
    poisoned = {**data.batches[0], "weights": data.batches[0]["weights"].copy()}
    poisoned["weights"][5, 1] = np.nan
    bad = train_on(program, [poisoned], state=before.state)
    assert bad.metrics[0]["skipped"]
    assert bad.metrics[0]["step"] == 2
    for name, leaf in named_leaves(jax.device_get(bad.state)).items():
        assert leaf.tobytes() == named_leaves(kept)[name].tobytes(), name
    after = train_on(program, data.batches[2:], state=bad.state)
    assert np.isfinite(after.losses).all()
    assert (after.metrics[0]["skipped"], after.metrics[0]["step"]) == (False, 3)


class ConstantSlope:
    """A task that needs no model: the steps below bring their own gradient."""

    def denominators(self, batch: Any) -> dict[str, jax.Array]:
        return {"loss": jnp.float32(1)}

    def counted(self, batch: Any) -> jax.Array:
        return jnp.float32(batch["x"].shape[0])


def toy_step(slope: float, loss: float = 1.0, clip: float | None = None) -> Any:
    """A step of plain gradient descent whose gradient and loss are given."""

    def gradient(params: Any, batch: Any, denominators: Any, key: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, slope), params), {"loss": jnp.float32(loss)}

    return jax.jit(make_train_step(ConstantSlope(), gradient, optax.identity(), clip))  # type: ignore[arg-type]


TOY_BATCH = {"x": jnp.zeros(4)}


def toy_inputs(**schedule: Any) -> dict[str, Any]:
    """The inputs of ten steps with a warm-up of three to 0.5."""
    optimizer = {"learning_rate": 0.5, "schedule": {"warmup": 3, **schedule}}
    config = Config.model_validate({"run_dir": "r", "steps": 10, "optimizer": optimizer})
    return {"key": jax.random.key(0), "schedule": schedule_inputs(config, 10)}


TOY_INPUTS = toy_inputs()
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "linear": {"kind": "linear"},
    "constant": {"kind": "constant"},
    "wsd": {"kind": "wsd", "decay": 0.4},
    "wsd, square root": {"kind": "wsd", "decay": 0.4, "decay_shape": "sqrt"},
    "inverse square root": {"kind": "inverse_sqrt"},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_logged_learning_rate_is_the_one_applied(schedule: str) -> None:
    step, state = toy_step(slope=1.0), initial_state({"w": jnp.zeros(1)}, optax.identity())
    inputs, rates = toy_inputs(**SCHEDULES[schedule]), []
    for number in range(1, 11):
        before = state["params"]["w"]
        state, metrics = step(state, TOY_BATCH, inputs)
        rates.append(metrics["learning_rate"].item())
        assert (before - state["params"]["w"]).item() == pytest.approx(rates[-1], rel=1e-5, abs=1e-7)
        assert metrics["step"] == number
    assert max(rates) == rates[2] == pytest.approx(0.5)


@pytest.mark.parametrize(("slope", "loss"), [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, np.inf)])
def test_a_non_finite_gradient_or_loss_skips_the_update(slope: float, loss: float) -> None:
    state = initial_state({"w": jnp.ones(3)}, optax.identity())
    state, metrics = toy_step(slope, loss, clip=1.0)(state, TOY_BATCH, TOY_INPUTS)
    assert metrics["skipped"]
    assert (state["params"]["w"].tolist(), state["step"].item()) == ([1.0, 1.0, 1.0], 0)


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    state = initial_state({"w": jnp.zeros(1)}, optax.identity())
    rates = []
    for slope in (1.0, np.nan, 1.0):
        state, metrics = toy_step(slope)(state, TOY_BATCH, TOY_INPUTS)
        rates.append(metrics["learning_rate"].item())
    assert rates[0] < rates[1] == rates[2]


def test_rows_are_numbered_in_the_global_batch() -> None:
    assert with_rows({"x": jnp.zeros((3, 2))})["row"].tolist() == [0, 1, 2]


def test_clipping_scales_all_gradients_alike_and_only_down() -> None:
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped = clip_by_norm(gradients, jnp.float32(5.0), 1.0)
    assert (clipped["a"].item(), clipped["b"].item()) == pytest.approx((0.6, 0.8))
    assert clip_by_norm(gradients, jnp.float32(5.0), 6.0) == gradients
    assert clip_by_norm(gradients, jnp.float32(5.0), None) is gradients


def test_clipping_a_gradient_of_zero_leaves_zero() -> None:
    assert clip_by_norm({"a": jnp.zeros(2)}, jnp.float32(0.0), 1.0)["a"].tolist() == [0.0, 0.0]
