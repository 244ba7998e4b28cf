"""From a config to a pipeline: which stage gets which layers, and in which order it works."""

import jax.numpy as jnp

from jaxtrain.config import Config
from jaxtrain.models.staged_contract import refuse_what_has_no_stages
from jaxtrain.models.task import Staged, Task
from jaxtrain.pipeline.buffers import plan_buffers
from jaxtrain.pipeline.costs import costs_of
from jaxtrain.pipeline.engine import Pipeline
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.simulation import simulate
from jaxtrain.pipeline.split import split_layers
from jaxtrain.pipeline.stages import Stages


def make_stages(config: Config, task: Task, stages: int) -> Stages:
    """The layers of each of so many stages; embedding and head count as load of the first and last one.

    Raises:
        ConfigError: the task isn't cut into layers, has fewer than there are virtual stages, or isn't what its parts
            are together.
    """
    refuse_what_has_no_stages(task, stages, jnp.dtype(config.precision))
    assert isinstance(task, Staged), "refused above"
    costs, chunks = costs_of(task), config.pipeline.chunks
    # Where layers multiply no matrices there is nothing to weigh them by.
    layer = costs.layer or 1.0
    split = split_layers(task.layer_count, stages, chunks, layer, costs.embed, costs.head)
    loads = [layer * split[virtual % stages][virtual // stages] for virtual in range(stages * chunks)]
    loads[0] += costs.embed
    loads[-1] += costs.head
    return Stages(split, tuple(loads))


def make_pipeline(config: Config, task: Staged, stages: Stages, microbatches: int) -> Pipeline:
    """The pipeline that works on so many micro-batches in a step.

    Raises:
        ConfigError: there is no such schedule.
    """
    chunks = config.pipeline.chunks
    schedule = make_schedule(config.pipeline.schedule, stages.count, microbatches, chunks)
    return Pipeline(task, stages, plan_buffers(schedule), microbatches, config.fsdp.gather == "step")


def describe_pipeline(config: Config, pipeline: Pipeline) -> str:
    """The choices of a pipeline, for people: schedule, micro-batches, layers of each stage, bubble."""
    stages = pipeline.stages
    schedule = make_schedule(config.pipeline.schedule, stages.count, pipeline.microbatches, len(stages.split[0]))
    bubble = simulate(schedule, [load / 3 for load in stages.loads], [2 * load / 3 for load in stages.loads]).bubble
    sizes = " ".join("+".join(map(str, chunks)) for chunks in stages.split)
    return (
        f"{config.pipeline.schedule} of {pipeline.microbatches} micro-batches over stages of {sizes} layers; "
        f"stages idle {bubble:.0%} of the time"
    )
