"""Where the trials of a worker run on GPUs that no environment variable gives to one of them."""

from __future__ import annotations

import pytest

from ddp_loop.sweeps import running


@pytest.fixture(autouse=True)
def four_devices_of_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "gpu_count", lambda: 4)
    monkeypatch.setattr(running, "gpu_visibility", lambda: "")


@pytest.mark.parametrize("slots", [None, 2, 3])
def test_one_trial_runs_at_a_time(slots: int | None) -> None:
    assert running.places_of(slots, 2) == [{}]


def test_more_slots_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match=r"on CUDA GPUs alone\. Got slots=4 for trials of 2 ranks\. Pass slots=2"):
        running.places_of(4, 2)
