"""Checkpoints without a layout: complete and verified, or they don't exist."""

from jaxtrain.checkpoint.checkpointer import Checkpointer
from jaxtrain.checkpoint.directory import list_checkpoints, step_path
from jaxtrain.checkpoint.interval import Choice, Pace
from jaxtrain.checkpoint.local import LocalTier
from jaxtrain.checkpoint.meta import Meta
from jaxtrain.checkpoint.part import Saved, deleted_meanwhile, mismatches, open_saved, restore_part
