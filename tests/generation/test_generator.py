"""Prompts are continued as whole forward passes would, whatever the batch and the mesh."""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.generation import Generator, Sampling
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.task import run_layers
from jaxtrain.step import with_rows
from tests.runs import tiny_program

MOST = 12
PROMPTS = [[7, 8, 9], [200], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [200, 3], [7, 8, 9]]
MESHES = {
    "one device": (1, ()),
    "fsdp=4 tensor=2": (8, ("mesh.fsdp=4", "mesh.tensor=2")),
    "data=8": (8, ("mesh.data=8",)),
}
GREEDY, DRAWN = Sampling(), Sampling(1.5, top_k=50, top_p=0.95)


@functools.cache
def parameters() -> dict[str, jax.Array]:
    """With logits that differ clearly."""
    program = tiny_program(1)
    params = jax.device_get(program.init(program.initial_key())["params"])
    return jax.tree.map(lambda leaf: leaf * (6 if leaf.ndim > 1 and leaf.std() > 0 else 1), params)


@functools.cache
def generator(
    sampling: Sampling = GREEDY, mesh: str = "one device", entries: int = 256, end: int | None = None, seed: int = 0
) -> Generator:
    devices, overrides = MESHES[mesh]
    program = tiny_program(devices, *overrides)
    params = jax.device_put(parameters(), jax.tree.map(lambda leaf: leaf.sharding, program.state["params"]))
    return Generator(program, params, entries, end, sampling, MOST, seed)


def tokens(generator: Generator, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    return [continuation.tokens for continuation in generator(prompts)]


def by_whole_forward_passes(prompts: list[list[int]]) -> list[list[int]]:
    """The likeliest next token of each row, again and again, with nothing remembered."""
    program = tiny_program(1)
    task = program.task
    assert isinstance(task, LanguageTask)
    length = max(map(len, prompts)) + MOST

    @jax.jit
    def likeliest(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        place = jnp.broadcast_to(jnp.arange(length), rows.shape)
        batch = with_rows({"tokens": rows, "segments": jnp.ones_like(place), "positions": place})
        x, _ = run_layers(task, params, task.embed(params, batch, None), task.context(batch), None)
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + task.config.norm_epsilon) * params["head"]["norm"]["scale"]
        return jnp.argmax(x @ params["head"]["projection"], axis=-1)

    rows = np.zeros((len(prompts), length), int)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = prompt
    ends = np.array([len(prompt) for prompt in prompts])
    for step in range(MOST):
        following = np.asarray(likeliest(parameters(), rows))
        rows[range(len(prompts)), ends + step] = following[range(len(prompts)), ends + step - 1]
    return [rows[row, end : end + MOST].tolist() for row, end in enumerate(ends)]


def test_greedy_decoding_is_the_likeliest_token_of_whole_forward_passes() -> None:
    found = tokens(generator())
    assert found == by_whole_forward_passes(PROMPTS)
    assert len({tuple(row) for row in found}) == 4, "different prompts are to have different continuations"


@pytest.mark.parametrize("mesh", ["fsdp=4 tensor=2", "data=8"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_mesh_changes_no_token(sampling: Sampling, mesh: str) -> None:
    assert tokens(generator(sampling, mesh)) == tokens(generator(sampling))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_prompt_is_continued_as_it_would_be_alone(sampling: Sampling) -> None:
    together = tokens(generator(sampling))
    alone = [tokens(generator(sampling), [prompt])[0] for prompt in PROMPTS[:4]]
    assert together[:4] == alone


def test_the_same_prompt_and_another_seed_are_drawn_anew_and_the_same_seed_is_not() -> None:
    found = tokens(generator(DRAWN))
    assert found[0] != found[4]
    assert found == tokens(generator(DRAWN))
    assert found != tokens(generator(DRAWN, seed=1))


def test_a_row_ends_with_the_document_and_the_others_go_on() -> None:
    whole = tokens(generator())
    end = whole[0][4]
    found = generator(end=end)(PROMPTS)
    assert found[0].tokens == whole[0][: whole[0].index(end)]
    for continuation, row in zip(found, whole, strict=True):
        assert continuation.ended == (end in row)
        assert continuation.tokens == (row[: row.index(end)] if end in row else row)
    assert not all(continuation.ended for continuation in found)


def test_ids_that_the_tokenizer_does_not_have_are_never_chosen() -> None:
    assert max(map(max, tokens(generator()))) >= 100
    for sampling in (GREEDY, Sampling(50.0)):
        assert max(map(max, tokens(generator(sampling, entries=100)))) < 100


def test_streamed_in_pieces_it_is_the_same_and_ends_when_all_rows_have() -> None:
    whole = tokens(generator())
    pieces = [[continuation.tokens for continuation in piece] for piece in generator().stream(PROMPTS, 5)]
    assert pieces == [[row[:count] for row in whole] for count in (1, 6, 11, 12)]
    first, only = generator(end=whole[0][0]), [PROMPTS[0]]
    assert [continuation.ended for (continuation,) in first.stream(only, 5)] == [True]


def test_prompts_of_other_lengths_and_other_pieces_compile_nothing_anew(caplog: pytest.LogCaptureFixture) -> None:
    def compiled(prompts: list[list[int]], steps: int) -> list[str]:
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            list(here.stream(prompts, steps))
        messages = [record.getMessage().split() for record in caplog.records]
        return [words[1] for words in messages if words[0] == "Compiling"]

    here = Generator(tiny_program(1), parameters(), 256, None, Sampling(0.9), MOST)
    assert compiled(PROMPTS, 3) == ["jit(start)", "jit(advance)"]
    assert compiled([[5] * 40, [6], [7], [8], [9]], 4) == []
