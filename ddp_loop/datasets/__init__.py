"""Labelled images: drawn digits, handwriting, folders of images, MNIST's files, noisy pairs."""

from ddp_loop.datasets.digits import digits, handwritten
from ddp_loop.datasets.idx import holds_idx, idx_folder, read_idx
from ddp_loop.datasets.image_folder import ImageFolder
from ddp_loop.datasets.images import LabelledImages, noisy_pairs

__all__ = [
    "ImageFolder",
    "LabelledImages",
    "digits",
    "handwritten",
    "holds_idx",
    "idx_folder",
    "noisy_pairs",
    "read_idx",
]
