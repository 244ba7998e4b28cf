"""Files of text to a data set: read, tokenised, split, shuffled and written, once.

files ── sources ──> units ── documents, runs ──> sorted runs ── shards ──> data set
"""

from jaxtrain.data.prepare.job import Recipe, Report, prepare, refuse_other
from jaxtrain.data.prepare.runs import Rules
from jaxtrain.data.prepare.sources import SourceFile, find_files, source_file
