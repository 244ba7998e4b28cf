"""The keys of `data`: what is read, and how it becomes batches."""

from pathlib import Path
from typing import Literal

from jaxtrain.config.base import Count, LocalPath, Section, setting


class DataConfig(Section):
    """What is read, and how it becomes batches."""

    dir: LocalPath = setting(Path("data/python-stdlib"), "Directory of the prepared data set.", may_change=True)
    source: Literal["python_stdlib"] | None = setting(
        None,
        "Source from which `dir` is prepared on first use: the running Python's standard library; null: it is there.",
        may_change=True,
    )
    vocab: Count | None = setting(
        None, "Vocabulary of the tokenizer that is trained when source prepares; null: model.vocab.", gt=0
    )
    held_out: float = setting(0.02, "Share of documents held out for evaluation when source prepares.", ge=0, lt=1)
    sequence: Count = setting(256, "Tokens in a row.", gt=0)
    pack: bool = setting(True, "Put several documents in a row, kept apart by segment ids; false: one, padded.")
    shuffle: bool = setting(True, "Read rows in an order drawn from the seed, new in each epoch.")
    epochs: Count | None = setting(None, "Passes over the data set; null: repeat for ever.", gt=0)
    workers: Count = setting(0, "Loader processes; 0: threads of the trainer.", may_change=True, ge=0, le=1000)
    prefetch: Count = setting(2, "Batches prepared ahead of the step.", may_change=True, ge=0, le=1000)
    log_rows: bool = setting(False, "Write the row ids of each step to RUN/rows-PROCESS.jsonl.", may_change=True)
