"""The decoding loop, compiled twice: once for reading the prompts, once for all steps after."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxtrain.generation.sampling import Sampling, choose
from jaxtrain.gradient import cast_for_compute
from jaxtrain.models.task import Cache, Generative, Params
from jaxtrain.program import Program
from jaxtrain.sharding import constrain

PROMPT_UNIT = 128
"""Prompts are filled up to a multiple of this: few lengths are ever compiled, and the flash kernel takes them."""
_NOTHING = -1
"""Stands in the buffer where a row has ended."""


class Prompts(NamedTuple):
    """Rows of tokens that end in the same slot.

    Attributes:
        first: the slot of each row's first token.
        draw: numbers the rows with the same prompt, which have different random numbers.
        wanted: false for rows that only complete the batch.
    """

    tokens: Int[Array, "rows prompt"]
    first: Int[Array, " rows"]
    draw: Int[Array, " rows"]
    wanted: Bool[Array, " rows"]


class Decoding(NamedTuple):
    """Where the loop stands: `chosen` tokens of each row are there, and all but the last are in the cache."""

    tokens: Int[Array, "rows most"]
    ended: Bool[Array, " rows"]
    last: Int[Array, " rows"]
    chosen: Int[Array, ""]
    cache: Cache


class Request(NamedTuple):
    """What the compiled programs are told beside the prompts."""

    sampling: Sampling
    seed: UInt32[Array, ""]


@dataclass(frozen=True)
class Continuation:
    """What a prompt was continued with; `ended`: by the end of the document, which is not among the tokens."""

    tokens: list[int]
    ended: bool


class Generator:
    """Continues prompts with one model.

    What a prompt is continued with depends on the model, the prompt, the sampling and the seed; not on the other
    prompts of its batch, the mesh, or the number of processes. The same prompt several times is drawn anew each time.

    Args:
        program: whose task is `Generative`; its mesh may be another one than the run's.
        params: of the model, in the program's shardings.
        entries: of the tokenizer: larger ids, which the model may have rows for, are never chosen.
        end: the id that ends a document, and with it a row; None: rows end only by their length.
        most: tokens that a prompt is continued with at most.
    """

    def __init__(
        self,
        program: Program,
        params: Params,
        entries: int,
        end: int | None,
        sampling: Sampling,
        most: int,
        seed: int = 0,
    ):
        task = program.task
        assert isinstance(task, Generative), "checked by the verb"
        self._params = params
        self._most = most
        layout = program.layout.for_decoding()
        self._rows_unit = layout.size(*layout.batch_axes)
        self._request = _request(sampling, seed)
        cast = partial(
            cast_for_compute, infos=program.infos, dtype=jnp.dtype(program.config.precision), layout=program.layout
        )
        loop = _Loop(task, cast, entries, end, most)
        # Whole on every device, so that every process can read them; the cache stays as it is split.
        whole: Any = layout.replicated()
        shardings = Decoding(whole, whole, whole, whole, cache=None)
        self._start = program.jit(loop.start, layout, out_shardings=shardings)
        self._advance = program.jit(loop.advance, layout, out_shardings=shardings, donate_argnums=4)

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
        """The continuation of each prompt of at least one token, in one batch."""
        *_, last = self.stream(prompts, self._most)
        return last

    def stream(self, prompts: Sequence[Sequence[int]], steps: int) -> Iterator[list[Continuation]]:
        """What there is of the continuations after one token, and then after every `steps` of them, to their end."""
        batch = aligned(prompts, self._rows_unit)
        decoding = self._start(self._params, batch, self._request)
        for until in [*range(1 + steps, self._most, steps), self._most]:
            continuations = _read(decoding, len(prompts))
            if jax.device_get(decoding.ended).all():
                break
            decoding = self._advance(self._params, batch, self._request, np.int32(until), decoding)
            yield continuations
        yield _read(decoding, len(prompts))


@dataclass(frozen=True)
class _Loop:
    """The two functions that are compiled."""

    task: Generative
    cast: Callable[[Params], Params]
    entries: int
    end: int | None
    most: int

    def start(self, params: Params, prompts: Prompts, request: Request) -> Decoding:
        """Reads the prompts and chooses the first token."""
        prompts = _placed(prompts)
        slots = prompts.tokens.shape[1] + self.most - 1
        logits, cache = self.task.prefill(self.cast(params), prompts.tokens, prompts.first, slots)
        rows = prompts.tokens.shape[0]
        nothing = Decoding(
            tokens=jnp.full((rows, self.most), _NOTHING, jnp.int32),
            ended=~prompts.wanted,
            last=jnp.zeros(rows, jnp.int32),
            chosen=jnp.zeros((), jnp.int32),
            cache=cache,
        )
        return self._with_next(nothing, logits, prompts, request)

    def advance(
        self, params: Params, prompts: Prompts, request: Request, until: Int[Array, ""], decoding: Decoding
    ) -> Decoding:
        """Decodes until `until` tokens of each row are chosen or all rows have ended."""
        prompts, params = _placed(prompts), self.cast(params)
        width = prompts.tokens.shape[1]

        def goes_on(decoding: Decoding) -> Bool[Array, ""]:
            return (decoding.chosen < until) & ~decoding.ended.all()

        def step(decoding: Decoding) -> Decoding:
            slot = width + decoding.chosen - 1
            logits, cache = self.task.decode(params, decoding.last, prompts.first, slot, decoding.cache)
            return self._with_next(decoding._replace(cache=cache), logits, prompts, request)

        return jax.lax.while_loop(goes_on, step, decoding)

    def _with_next(
        self, decoding: Decoding, logits: Float[Array, "rows vocab"], prompts: Prompts, request: Request
    ) -> Decoding:
        """One token more of each row that has not ended."""
        known = jnp.arange(logits.shape[1]) < self.entries
        logits = constrain(jnp.where(known, logits, -jnp.inf), "batch", None)
        tokens = choose(logits, request.sampling, _keys(request.seed, prompts.draw, decoding.chosen))
        new = jnp.where(decoding.ended, _NOTHING, tokens)
        return decoding._replace(
            tokens=jax.lax.dynamic_update_slice_in_dim(decoding.tokens, new[:, None], decoding.chosen, axis=1),
            ended=decoding.ended if self.end is None else decoding.ended | (tokens == self.end),
            last=jnp.where(decoding.ended, 0, tokens),
            chosen=decoding.chosen + 1,
        )


def aligned(prompts: Sequence[Sequence[int]], rows_unit: int) -> Prompts:
    """The prompts as numpy arrays, filled up at their beginning, and with rows that aren't wanted."""
    rows = -(-len(prompts) // rows_unit) * rows_unit
    width = -(-max(map(len, prompts)) // PROMPT_UNIT) * PROMPT_UNIT
    tokens: Any = np.zeros((rows, width), np.int32)
    first: Any = np.full(rows, width - 1, np.int32)
    draw: Any = np.zeros(rows, np.int32)
    wanted: Any = np.arange(rows) < len(prompts)
    seen: Counter[tuple[int, ...]] = Counter()
    for row, prompt in enumerate(prompts):
        first[row] = width - len(prompt)
        tokens[row, first[row] :] = prompt
        draw[row] = seen[tuple(prompt)]
        seen[tuple(prompt)] += 1
    return Prompts(tokens, first, draw, wanted)


def _keys(seed: UInt32[Array, ""], draw: Int[Array, " rows"], count: Int[Array, ""]) -> Key[Array, " rows"]:
    return jax.vmap(lambda draw: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draw), count))(draw)


def _placed(prompts: Prompts) -> Prompts:
    return prompts._replace(tokens=constrain(prompts.tokens, "batch", None), first=constrain(prompts.first, "batch"))


def _request(sampling: Sampling, seed: int) -> Request:
    """As numpy, which the compiled programs take as inputs; a plain Python number would have no fixed type."""
    kinds: tuple[Any, ...] = (np.float32, np.int32, np.float32)
    given = [None if value is None else kind(value) for kind, value in zip(kinds, sampling, strict=True)]
    number: Any = np.uint32(seed)
    return Request(Sampling(*given), number)


def _read(decoding: Decoding, rows: int) -> list[Continuation]:
    tokens, ended = jax.device_get((decoding.tokens, decoding.ended))
    found = []
    for row in range(rows):
        chosen = [int(token) for token in tokens[row] if token != _NOTHING]
        found.append(Continuation(chosen[:-1] if ended[row] else chosen, bool(ended[row])))
    return found
