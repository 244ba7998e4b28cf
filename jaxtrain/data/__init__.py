"""Data: prepared once, packed into rows, read in an order that is a function of one integer.

    text ── prepare ──> data set on disk ── packing ──> rows ── order ──> batches of this process

Importing these modules does not import jax, so that a tool or a worker starts quickly; Grain does, and is imported
where it is used. Nothing here touches a device.
"""

from jaxtrain.data.arrays import ArrayTable, Tables
from jaxtrain.data.best_fit import BestFitPlan, place_best_fit
from jaxtrain.data.dataset import Dataset, open_dataset
from jaxtrain.data.digits import load_digits
from jaxtrain.data.loader import ROW_IDS, HostBatches, host_batches
from jaxtrain.data.manifest import Manifest, has_manifest
from jaxtrain.data.mixture import MixtureOrder, MixtureTable, Stage
from jaxtrain.data.order import Order, RowOrder
from jaxtrain.data.packing import Piece, RowPlan
from jaxtrain.data.prepare import Recipe, Report, Rules, find_files, prepare
from jaxtrain.data.progress import console_progress
from jaxtrain.data.python_stdlib import ensure_python_stdlib
from jaxtrain.data.rows import FILLER, Batch, Packed, RowTable, Table
from jaxtrain.data.writer import write_dataset

__all__ = [
    "FILLER",
    "ROW_IDS",
    "ArrayTable",
    "Batch",
    "BestFitPlan",
    "Dataset",
    "HostBatches",
    "Manifest",
    "MixtureOrder",
    "MixtureTable",
    "Order",
    "Packed",
    "Piece",
    "Recipe",
    "Report",
    "RowOrder",
    "RowPlan",
    "RowTable",
    "Rules",
    "Stage",
    "Table",
    "Tables",
    "console_progress",
    "ensure_python_stdlib",
    "find_files",
    "has_manifest",
    "host_batches",
    "load_digits",
    "open_dataset",
    "place_best_fit",
    "prepare",
    "write_dataset",
]
