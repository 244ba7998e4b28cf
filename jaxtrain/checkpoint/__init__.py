"""Checkpoints without a layout: complete and verified, or they don't exist."""

from jaxtrain.checkpoint.checkpointer import Checkpointer, Meta
from jaxtrain.checkpoint.directory import list_checkpoints, state_path, step_path

__all__ = ["Checkpointer", "Meta", "list_checkpoints", "state_path", "step_path"]
