"""Real handwritten digits: 1,797 grey images of 8×8 pixels that come with scikit-learn, so without a download.

E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998).
"""

import numpy as np

from jaxtrain.data.arrays import ArrayTable, Tables

LARGEST_PIXEL = 16


def load_digits(held_out: float) -> Tables:
    """The digits, of which a `held_out` share, the same ones in every run, is held out.

    Rows hold image (float32 [8, 8, 1], 0 to 1), label (int32, 0 to 9) and weights (float32).
    """
    from sklearn.datasets import load_digits as load

    digits = load()
    # They lie in the order of the people who wrote them.
    mixed = np.random.default_rng(0).permutation(len(digits.images))
    images = (digits.images[mixed] / LARGEST_PIXEL).astype(np.float32)[..., None]
    labels = digits.target[mixed].astype(np.int32)
    held = round(held_out * len(images))
    split = len(images) - held

    def table(rows: slice) -> ArrayTable:
        return ArrayTable({"image": images[rows], "label": labels[rows]})

    return Tables(table(slice(split)), table(slice(split, None)) if held else None)
