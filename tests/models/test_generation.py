"""Decoding from a cache gives the logits of a whole forward pass, at every position and for every kind of model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import DecoderConfig
from jaxtrain.gradient import cast_for_compute
from jaxtrain.models.decoder import KeysValues
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import describe, unbox
from jaxtrain.models.task import Generative, run_layers
from jaxtrain.sharding import use_layout
from jaxtrain.step import with_rows
from tests.runs import make_layout

VOCAB, SEQUENCE, SLOTS = 64, 24, 32
TINY = {"vocab": VOCAB, "layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "mlp": 96, "initial_scale": 0.1}
MODELS = {
    "grouped queries": {},
    "one key head for each query head": {"kv_heads": None},
    "one key head for all": {"kv_heads": 1},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "tied, capped, with norms and biases": {
        "tied_embeddings": True, "logit_softcap": 0.5, "qk_norm": True, "bias": "all", "activation": "gelu",
    },
}  # fmt: skip
PROMPTS = [[7], [1, 2, 3, 4, 5, 6, 7], [9, 8, 60, 8, 9, 11, 12, 13, 14, 15, 16], [5, 5, 5]]
"""Rows of different lengths, the longest above every window."""
CONTINUATION = np.random.default_rng(0).integers(0, VOCAB, (len(PROMPTS), 8))
SIZES = {"one device": {}, "fsdp=4": {"fsdp": 4}, "data=2 fsdp=2 tensor=2": {"data": 2, "fsdp": 2, "tensor": 2}}
MESHES = list(SIZES)


def task_of(**options: object) -> LanguageTask:
    return LanguageTask(DecoderConfig.model_validate({**TINY, **options}), SEQUENCE)


@functools.cache
def parameters(task: LanguageTask) -> dict[str, jax.Array]:
    """Initial ones, with biases and norms that do something."""
    leaves, tree = jax.tree.flatten(unbox(task.init(jax.random.key(0))))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        tree, [leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    )


def whole_forward(task: LanguageTask, rows: list[list[int]]) -> np.ndarray:
    """[rows, tokens, vocab]: the logits of one forward pass over whole rows, the head written out.

    Rows are filled up at their end, which what is before can't see.
    """
    params, config, length = parameters(task), task.config, max(map(len, rows))

    def forward(tokens: jax.Array) -> jax.Array:
        place = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        batch = with_rows({"tokens": tokens, "segments": jnp.ones_like(place), "positions": place})
        x, _ = run_layers(task, params, task.embed(params, batch, None), task.context(batch), None)
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * params["head"]["norm"]["scale"]
        logits = x @ (params["embed"]["table"].T if config.tied_embeddings else params["head"]["projection"])
        cap = config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    return np.asarray(jax.jit(forward)(jnp.array([row + [0] * (length - len(row)) for row in rows])))


def cached(task: LanguageTask, mesh: str, prompts: list[list[int]]) -> np.ndarray:
    """[rows, 1 + continuation, vocab]: the logits after the prompts and after each token that was fed in."""
    params, longest = parameters(task), max(map(len, prompts))
    first = jnp.array([longest - len(prompt) for prompt in prompts])
    tokens = jnp.array([[13] * (longest - len(prompt)) + prompt for prompt in prompts])
    with use_layout(make_layout(**SIZES[mesh]).for_decoding()):
        logits, cache = jax.jit(task.prefill, static_argnums=3)(params, tokens, first, SLOTS)
        decode, found = jax.jit(task.decode), [logits]
        for step in range(CONTINUATION.shape[1]):
            logits, cache = decode(params, jnp.array(CONTINUATION[: len(prompts), step]), first, longest + step, cache)
            found.append(logits)
    return np.stack([np.asarray(logits) for logits in found], axis=1)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *((model, "one device") for model in MODELS),
        *(("tied, capped, with norms and biases", mesh) for mesh in MESHES[1:]),
    ],
)
def test_cached_logits_are_those_of_the_whole_forward_pass_at_every_position(model: str, mesh: str) -> None:
    task = task_of(**MODELS[model])
    assert isinstance(task, Generative)
    found = cached(task, mesh, PROMPTS)
    whole = whole_forward(task, [prompt + new for prompt, new in zip(PROMPTS, CONTINUATION.tolist(), strict=True)])
    for row, prompt in enumerate(PROMPTS):
        wanted = whole[row, len(prompt) - 1 :][: found.shape[1]]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-5, atol=2e-5)
        assert np.abs(wanted[:-1] - wanted[1:]).max() > 0.05, "the logits don't depend on the position"


def test_a_row_is_continued_as_it_would_be_alone() -> None:
    task = task_of()
    together = cached(task, "one device", PROMPTS)
    np.testing.assert_allclose(together[:1], cached(task, "one device", PROMPTS[:1]), rtol=1e-5, atol=1e-5)


def test_what_stands_in_the_slots_before_a_row_does_not_matter() -> None:
    task, params = task_of(), parameters(task_of())
    prefill = jax.jit(task.prefill, static_argnums=3)
    first = jnp.array([3])
    one, other = (prefill(params, jnp.array([[filler] * 3 + [4, 5]]), first, 8)[0] for filler in (0, 60))
    np.testing.assert_array_equal(one, other)


def test_the_cache_keeps_the_compute_dtype_and_the_logits_are_float32() -> None:
    task = LanguageTask(DecoderConfig.model_validate(TINY), SEQUENCE, jnp.bfloat16)
    params, infos = parameters(task_of()), describe(jax.eval_shape(task.init, jax.random.key(0)))

    def prefill(tokens: jax.Array, first: jax.Array) -> tuple[jax.Array, KeysValues]:
        return task.prefill(cast_for_compute(params, infos, jnp.bfloat16, make_layout()), tokens, first, SLOTS)

    logits, cache = jax.eval_shape(prefill, jnp.zeros((3, 8), int), jnp.zeros(3, int))
    assert (logits.shape, logits.dtype) == ((3, VOCAB), jnp.float32)
    for kept in cache:
        assert (kept.shape, kept.dtype) == ((2, 3, SLOTS, 2, 16), jnp.bfloat16)
