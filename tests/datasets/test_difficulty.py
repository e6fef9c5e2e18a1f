"""The difficulty of the drawn digits for the reference setting; test_datasets has that for a linear classifier."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop import datasets, networks
from tests.support.harness import OnRanks
from tests.support.training import loop_on

pytestmark = [pytest.mark.slow, pytest.mark.covers("A1")]


def train_one_epoch() -> float:
    train, test = datasets.digits(seed=0).split(0.9)
    with dl.join_world(seed=0) as world:
        model = networks.digit_classifier().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in loop_on(dl.Batches(train, 128, world), model, optimizer):
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            step.fold()
            optimizer.step()
        batches = dl.Batches(test, 1000, world, shuffle=False)
        return dl.evaluate(model, batches, accuracy=lambda logits, labels: logits.argmax(1) == labels)["accuracy"]


def test_one_epoch_of_the_reference_setting_stays_under_0_98(on_ranks: OnRanks) -> None:
    for accuracy in on_ranks(2, train_one_epoch):  # of 35 runs 0.868 to 0.976; after 20 epochs 0.996 to 1
        assert 0.8 < accuracy < 0.98
