"""The results of benchmarks/meaning.py for ddp_loop, DDP, Accelerate and Fabric, and its counts of lines."""

from __future__ import annotations

import pytest

from benchmarks.jobs.variants import VARIANTS, installed
from benchmarks.meaning import TRAINED, WEIGHTED, Meaning, meaning
from benchmarks.scripts import count_lines

WRONG = 1e-3  # the peers' errors are 0.015 and more, accuracy's 0.004
ROUNDING = 1e-12  # float64; sums of 7 terms

PEERS = [name for name in VARIANTS if name != "ours"]
PADDED = [name for name in [*PEERS, WEIGHTED] if not name.startswith("Accelerate")]


@pytest.fixture(scope="module")
def found() -> dict[str, Meaning]:
    """All installed libraries, in new processes: Accelerate and Fabric keep global state."""
    return meaning([*installed(), WEIGHTED])


def of(found: dict[str, Meaning], name: str) -> Meaning:
    if name not in found:
        pytest.skip(f"needs {VARIANTS[name].needs}, which is not installed")
    return found[name]


@pytest.mark.slow
def test_ours_is_exact_in_everything(found: dict[str, Meaning]) -> None:
    ours = found["ours"]
    errors = *ours.losses, ours.gradient, ours.running_mean, ours.running_var, ours.accuracy
    assert max(errors) < ROUNDING
    assert (ours.trained, ours.evaluated) == (100, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_mean_over_ranks_gives_unequal_shards_equal_weights(found: dict[str, Meaning], name: str) -> None:
    peer = of(found, name)
    of_rank_0, mean_of_ranks, by_counts = peer.losses
    assert min(of_rank_0, mean_of_ranks, peer.gradient) > WRONG
    assert by_counts < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PEERS, WEIGHTED])
def test_the_others_keep_the_batch_statistics_of_one_rank(found: dict[str, Meaning], name: str) -> None:
    peer = of(found, name)
    assert min(peer.running_mean, peer.running_var) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("name", PADDED)
def test_a_distributed_sampler_repeats_samples(found: dict[str, Meaning], name: str) -> None:
    peer = of(found, name)
    assert (peer.trained, peer.evaluated) == (102, 1002)
    assert peer.accuracy > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("Accelerate")])
def test_accelerate_evaluates_each_sample_once_and_pads_the_last_mini_batch_of_training(
    found: dict[str, Meaning], name: str
) -> None:
    peer = of(found, name)
    assert (peer.evaluated, peer.accuracy) == (1000, 0)
    assert peer.trained > TRAINED


@pytest.mark.slow
def test_ddp_with_weights_by_hand_has_the_exact_gradient(found: dict[str, Meaning]) -> None:
    assert found[WEIGHTED].gradient < ROUNDING


def test_lines_are_those_with_code() -> None:
    source = '''"""A text.

Of three lines.
"""

# a comment
NUMBER = 1  # counts once


def function(
    argument: str,
) -> str:
    """Not this."""
    return """but

these"""
'''
    assert count_lines(source) == 7
