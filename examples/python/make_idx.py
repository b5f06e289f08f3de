"""Writes scikit-learn's digits as the four IDX files of an MNIST folder: ``python make_idx.py <folder>``.

1,437 images of 8 x 8 pixels from 0 to 16 to learn from and the other 360 to test with; the division is fixed.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """One array as IDX: zero, zero, 8 (unsigned bytes), the number of dimensions, big-endian sizes, the bytes."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())


def make_idx(folder: Path) -> None:
    """Writes the four files into `folder`, which is made if it is not there."""
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_idx(folder / "train-images-idx3-ubyte", train_images)
    write_idx(folder / "train-labels-idx1-ubyte", train_labels)
    write_idx(folder / "t10k-images-idx3-ubyte", test_images)
    write_idx(folder / "t10k-labels-idx1-ubyte", test_labels)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make_idx(Path(sys.argv[1]))
