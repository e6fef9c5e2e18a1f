"""Every block of Python in the short guides, on one rank and on two, and what the guides say of the results."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_loop.data.readers import LOADER_OPTIONS
from tests.support.compiling import compiling
from tests.support.documents import text_of
from tests.support.harness import OnRanks
from tests.support.paths import DOCS
from tests.support.snippets import Ran, blocks_of, run_python

COMPILING_S = 200.0
NEW = (
    "batch_norm",
    "buffers",
    "gradient_accumulation",
    "data",
    "faq",
    "compile",
    "larger_models",
    "when_to_use",
    "tutorial",
    "checkpoints",
)


def run_guide(
    name: str, on_ranks: OnRanks, folder: Path, run: Callable[..., Ran] = run_python, **options: float
) -> tuple[Ran, Ran]:
    """All blocks of a guide on one rank, and on two, which must agree."""
    texts = [block.text for block in blocks_of(f"docs/{name}.md") if block.language == "python"]
    (one,) = on_ranks(1, run, str(folder / "one"), *texts, **options)
    two, other = on_ranks(2, run, str(folder / "two"), *texts, **options)
    assert two.weights == other.weights
    return one, two


@pytest.mark.covers("J17")
def test_the_guide_to_batch_norm_gives_the_numbers_that_it_promises(on_ranks: OnRanks, tmp_path: Path) -> None:
    one, two = run_guide("batch_norm", on_ranks, tmp_path)
    synced, fixed, averaged = range(3)
    assert one.weights[synced] == pytest.approx(two.weights[synced], rel=1e-10, abs=1e-12)
    assert one.weights[fixed] == two.weights[fixed]
    assert one.weights[synced] != pytest.approx(one.weights[fixed], rel=1e-6)  # another normalisation
    assert len(one.weights[averaged]) > len(one.weights[fixed])  # `n_averaged` too


@pytest.mark.covers("J17")
def test_the_guide_to_accumulation_gives_the_numbers_that_it_promises(on_ranks: OnRanks, tmp_path: Path) -> None:
    one, two = run_guide("gradient_accumulation", on_ranks, tmp_path)
    assert one.weights == two.weights  # the shards are fixed
    check = "for shards in (1, 3, 8):\n    model = train(shards)\n    print(model.weight.tolist())"
    job = blocks_of("docs/gradient_accumulation.md")[0].text
    (found,) = on_ranks(1, run_python, str(tmp_path / "same"), job, check)
    first, *others = [[float(word) for word in re.findall(r"-?\d\.\d+", line)] for line in found.printed.splitlines()]
    assert [one == pytest.approx(first, rel=1e-12) for one in others] == [True, True]


@pytest.mark.covers("J17")
def test_the_guide_to_data_gives_the_numbers_that_it_promises(on_ranks: OnRanks, tmp_path: Path) -> None:
    one, two = run_guide("data", on_ranks, tmp_path)
    trained = 2  # the block that trains
    assert one.weights[trained] == pytest.approx(two.weights[trained], rel=1e-12, abs=1e-12)
    assert one.printed == two.printed
    assert re.fullmatch(r"\d\.\d{3} per token\n", one.printed)


def test_the_guide_to_data_lists_the_keywords_of_the_loader() -> None:
    _, _, section = text_of("docs/data.md").partition("## Keywords of the loader\n")
    taken, refused = (set(re.findall(r"`(\w+)(?:=\w+)?`", table)) for table in section.split("\n\n| keyword")[1:])
    assert taken >= LOADER_OPTIONS
    for keyword in ("sampler", "batch_sampler", "generator", "in_order"):
        assert keyword in refused - LOADER_OPTIONS


@pytest.mark.covers("J17")
def test_the_answers_to_the_questions_run(on_ranks: OnRanks, tmp_path: Path) -> None:
    one, two = run_guide("faq", on_ranks, tmp_path)
    assert (one.printed, two.printed) == ("once\n", "once\n")


@pytest.mark.covers("J17")
def test_the_guide_to_larger_models_runs_and_its_figures_are_right(on_ranks: OnRanks, tmp_path: Path) -> None:
    texts = [block.text for block in blocks_of("docs/larger_models.md")]
    assert "fully_shard(layer)" in texts[-1]
    (one,) = on_ranks(1, run_python, str(tmp_path / "one"), *texts[:-1])  # FSDP alone on a rank leaves a process group
    two, other = on_ranks(2, run_python, str(tmp_path / "two"), *texts)
    assert two.weights == other.weights
    assert one.printed == "15 GiB for 1 billion parameters with Adam, 7 with plain SGD\n"
    assert "That is 15 GiB with Adam and 7 with plain SGD." in text_of("docs/larger_models.md")
    assert one.weights[1] == pytest.approx(two.weights[1], rel=1e-5, abs=1e-6)


@pytest.mark.covers("J17")
def test_the_guide_to_migration_draws_by_weight_alike_on_any_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    (draws,) = [one.text for one in blocks_of("docs/migrate.md") if "WeightedDraws" in one.text]
    printed = [on_ranks(ranks, run_python, str(tmp_path / str(ranks)), draws)[0].printed for ranks in (1, 2, 3)]
    assert printed == [printed[0]] * 3
    ones, of, total = printed[0].split()
    assert (of, total) == ("of", "1000")
    assert abs(int(ones) - 500) < 80  # five standard deviations of 16; without weights they are 100


def run_compiled(folder: str, *texts: str) -> Ran:
    with compiling():
        return run_python(folder, *texts)


@pytest.mark.covers("J17")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_the_guide_to_compiling_gives_the_same_bits_on_any_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    one, two = run_guide("compile", on_ranks, tmp_path, run_compiled, timeout_s=COMPILING_S)
    assert one.weights == two.weights
    assert one.weights[0]


def test_every_guide_with_code_is_run_here_or_beside() -> None:
    """A new page with blocks of Python needs a test of them."""
    assert [name for name in NEW if not (DOCS / f"{name}.md").is_file()] == []
    assert [block.language for block in blocks_of("docs/when_to_use.md")] == []


@pytest.mark.parametrize("name", NEW)
def test_a_guide_is_in_the_table_of_contents(name: str) -> None:
    assert f"\ndocs/{name}\n" in (DOCS / "site" / "conf.py").read_text()


def test_the_figures_of_when_to_use_it_are_those_of_the_comparison() -> None:
    peers, page = text_of("docs/benchmarks/peers.md"), text_of("docs/when_to_use.md")
    for ours, figure in (("38 lines instead of 56", "| ours | 38 |"), ("38 lines instead of 56", "| DDP | 56 |")):
        assert (ours in page, figure in peers) == (True, True)
    for number, line in (("126", "| Accelerate |"), ("102", "| Fabric |")):
        assert f"{number} samples for 100" in page or f"({number} for 100)" in page
        assert any(row.startswith(line) and f"| {number} |" in row for row in peers.splitlines())
    assert ("0.98" in page, "| ours / DDP | 0.977 |" in peers) == (True, True)
    assert ("1.03" in page, "| ours / DDP, tuned | 1.032 |" in peers) == (True, True)
