"""The guide to buffers: its codebook, centre, maximum and queue are one device's, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.comparing import is_same, same_on_all
from tests.support.documents import text_of
from tests.support.harness import OnRanks
from tests.support.snippets import blocks_of

pytestmark = [pytest.mark.covers("D6", "J17")]

GUIDE = "docs/buffers.md"
EXAMPLES = ("Quantized", "Centred", "Scaled", "Contrast")  # the classes of its blocks, in order
RUNS = ((1, None), (2, None), (3, None), (1, 6), (2, 6), (3, 6))  # ranks and shards
Names = dict[str, Any]


def run_example(example: str, shards: int | None) -> Names:
    """The names of the guide's first block and of the example's, run with so many shards."""
    texts = [block.text for block in blocks_of(GUIDE) if block.language == "python"]
    assert len(texts) == 1 + len(EXAMPLES)
    names: Names = {"__name__": "snippet"}
    for text in (texts[0], texts[1 + EXAMPLES.index(example)]):
        exec(compile(text.replace("shards=None", f"shards={shards}"), "snippet", "exec"), names)
    return names


def train(example: str, shards: int | None) -> list[torch.Tensor]:
    model = run_example(example, shards)["model"]
    return [one.detach().clone() for one in model.state_dict().values()]


def train_plainly(example: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The state of a plain torch loop on one device, and its buffers before the first step."""
    names = run_example(example, None)
    with dl.join_world(seed=0):
        model: Any = names[example]()
    first = [one.clone() for one in model.buffers()]
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):
        for some in names["rows"].double().split(20):
            loss, *keys = model(some) if example == "Contrast" else (model(some),)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            if keys:
                model.enqueue(*keys)
    return [one.detach() for one in model.state_dict().values()], first


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.slow
def test_the_guides_buffers_are_one_devices_and_have_the_same_bits_with_fixed_shards(
    example: str, on_ranks: OnRanks
) -> None:
    expected, first = train_plainly(example)
    runs = {(ranks, shards): same_on_all(on_ranks(ranks, train, example, shards)) for ranks, shards in RUNS}
    assert is_same(runs[1, None], expected)
    for found in runs.values():
        # float64, sums of at most 64 terms; the last mini-batch has one sample, and two of three ranks have none.
        assert all(torch.allclose(one, wanted, 1e-12, 1e-12) for one, wanted in zip(found, expected, strict=True))
        assert not any(is_same([one], [before]) for one, before in zip(found[: len(first)], first, strict=True))
    assert is_same(runs[2, 6], runs[1, 6])
    assert is_same(runs[3, 6], runs[1, 6])


def without_its_rule(example: str) -> str:
    names = run_example(example, None)
    with pytest.raises(ValueError, match="must change a buffer alike") as refused:
        names["train"](names[example], {}, shards=3)
    return str(refused.value)


@pytest.mark.parametrize("example", EXAMPLES[:3])
def test_without_its_rule_an_example_is_refused_with_the_name_of_the_guide(example: str) -> None:
    assert GUIDE in without_its_rule(example)


def test_the_readme_and_other_guides_lead_to_the_guide() -> None:
    assert "](docs/buffers.md)" in text_of("README.md")
    for page in ("migrate", "faq", "batch_norm", "gradient_accumulation"):
        assert "](buffers.md" in text_of(f"docs/{page}.md"), page
