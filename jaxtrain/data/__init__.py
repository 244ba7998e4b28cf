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
from jaxtrain.data.mixture import MixtureOrder, MixtureTable, Stage
from jaxtrain.data.order import Order, RowOrder
from jaxtrain.data.packing import Piece, RowPlan
from jaxtrain.data.prepare import Recipe, Rules, find_files, prepare
from jaxtrain.data.progress import console_progress
from jaxtrain.data.python_stdlib import ensure_python_stdlib
from jaxtrain.data.rows import FILLER, Batch, RowTable, Table
from jaxtrain.data.writer import write_dataset
