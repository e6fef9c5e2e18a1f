"""Noisy and clean pairs: density, size, range, and quarter-turns that both pictures share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import ddp_loop as dl
from ddp_loop import datasets
from ddp_loop.datasets import noisy_pairs
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("A14")

SIZE = 40


def draws_of(count: int, seed: int = 0, epoch: int = 1) -> dl.Draws:
    return dl.Draws(seed, epoch, torch.arange(count), torch.device("cpu"))


def digits(size: int = SIZE) -> torch.Tensor:
    return datasets.digits(seed=0, size=size).images


def test_a_twentieth_of_the_pixels_is_black_or_white_half_of_them_each() -> None:
    # 32x32, which is not resized, and from black to white, which is not rescaled.
    n = 400
    grey = torch.full((n, 1, 32, 32), 128, dtype=torch.uint8)
    grey[:, :, 0, :2] = torch.tensor([0, 255], dtype=torch.uint8)
    noisy, clean = noisy_pairs(grey, draws_of(n), turned=False)
    assert torch.equal(clean, grey / 255)
    rest = noisy.flatten(1)[:, 2:]
    pepper, salt = (rest == 0).float().mean(), (rest == 1).float().mean()
    deviation = (0.025 * 0.975 / rest.numel()) ** 0.5
    assert abs(float(pepper) - 0.025) < 5 * deviation
    assert abs(float(salt) - 0.025) < 5 * deviation
    assert bool(((rest == 0) | (rest == 1) | (rest == 128 / 255)).all())
    counts = (rest != 128 / 255).sum(1)
    assert len(counts.unique()) > 20  # drawn for each picture: 51 on average, deviation 7
    for density in (0.4, 1.0):
        noisy, clean = noisy_pairs(grey, draws_of(n), density=density)
        assert abs(float((noisy != clean)[:, :, 1:-1, 1:-1].float().mean()) - density) < 0.01
        assert abs(float((noisy == 0)[:, :, 1:-1, 1:-1].float().mean()) - density / 2) < 0.01


def test_pictures_are_resized_to_32x32_by_cubic_interpolation_and_stretched_over_0_to_1() -> None:
    images = digits()
    _, clean = noisy_pairs(images, draws_of(SIZE), turned=False)
    for image, picture in zip(images, clean, strict=True):
        # pillow's cubic interpolation, in another order of sums
        resized = np.asarray(
            Image.fromarray(image[0].numpy().astype(np.float32)).resize((32, 32), Image.Resampling.BICUBIC)
        )
        expected = (resized - resized.min()) / (resized.max() - resized.min())
        np.testing.assert_allclose(picture[0].numpy(), expected, atol=1e-5)


def test_each_picture_is_stretched_on_its_own_and_one_grey_becomes_0() -> None:
    images = digits()
    images[0] = 200
    images[1] //= 4
    clean, same = noisy_pairs(images, draws_of(SIZE), density=0.0)
    assert torch.equal(clean, same)
    for pictures in (clean, same):
        assert pictures.dtype == torch.float32
        assert pictures.shape == (SIZE, 1, 32, 32)
        assert pictures[0].unique().tolist() == [0.0]
        assert pictures[1:].amin((1, 2, 3)).unique().tolist() == [0.0]
        assert pictures[1:].amax((1, 2, 3)).unique().tolist() == [1.0]


def test_both_pictures_of_a_pair_have_the_same_quarter_turns_each_equally_often() -> None:
    images = digits(400)
    upright = noisy_pairs(images, draws_of(400), turned=False)
    turned = noisy_pairs(images, draws_of(400))
    quarters = [
        quarter
        for k in range(400)
        for quarter in range(4)
        if all(
            torch.equal(torch.rot90(one[k], quarter, (1, 2)), other[k])
            for one, other in zip(upright, turned, strict=True)
        )
    ]
    assert len(quarters) == 400
    counts = np.bincount(quarters, minlength=4)
    assert counts.min() > 100 - 5 * (400 * 3 / 16) ** 0.5  # five deviations
    other_epoch = noisy_pairs(images, draws_of(400, epoch=2))
    assert not any(torch.equal(one, other) for one, other in zip(turned[0], other_epoch[0], strict=True))


def test_no_images_give_no_pairs() -> None:
    noisy, clean = noisy_pairs(digits(10)[:0], draws_of(0))
    assert noisy.shape == clean.shape == (0, 1, 32, 32)


def pairs_of(shards: int | None, batch_size: int, shuffle: bool) -> torch.Tensor:
    """Noisy beside clean for each sample, in the data's order: (SIZE, 2, 32, 32)."""
    with dl.join_world(device="cpu", seed=4) as world:
        batches = dl.Batches(digits(), batch_size, world, shuffle=shuffle, shards=shards, transform=noisy_pairs)
        return dl.predict(torch.nn.Identity(), batches, forward=lambda model, pair: torch.cat(pair, dim=1))


def test_pairs_depend_on_the_sample_not_on_ranks_or_shards(on_ranks: OnRanks) -> None:
    (alone,) = on_ranks(1, pairs_of, 1, 16, True)
    assert len(alone) == SIZE
    for ranks, shards, batch_size, shuffle in [(2, None, 16, True), (3, 4, 7, False)]:
        for together in on_ranks(ranks, pairs_of, shards, batch_size, shuffle):
            assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("images", "density", "said"),
    [
        (torch.zeros(3, 1, 28, 28), 0.05, r"Got torch.float32 \(3, 1, 28, 28\). Give Batches the images only"),
        (torch.zeros(3, 28, 28).byte(), 0.05, r"needs images, uint8 \(N, C, H, W\)\. Got torch.uint8 \(3, 28, 28\)"),
        *((digits(10), density, r"a share of the pixels, 0 \.\. 1\. Got") for density in (-0.1, 1.5, float("nan"))),
    ],
)
def test_other_tensors_than_images_and_a_density_outside_0_to_1_are_refused(
    images: torch.Tensor, density: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        noisy_pairs(images, draws_of(len(images)), density=density)
