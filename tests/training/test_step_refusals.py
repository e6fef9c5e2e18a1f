"""A step that a script goes through wrongly: one clear error on every rank, whether one rank or all do it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.training.validation import Reduction
from tests.support.gathering import spread
from tests.support.harness import OnRanks
from tests.support.refusals import (
    ALL,
    MOST_S,
    Refused,
    does_it,
    loop_over,
    loss_of,
    mean_of,
    network,
    on_this_rank,
    samples,
)
from tests.support.training import LossOf, train

pytestmark = pytest.mark.on_gpus_too

Give = Callable[[dl.Step, Any, torch.Tensor], object]  # what a script does with a shard
Act = Callable[[dl.Step, Any], object]  # and in a step


def calling(*calls: dict[str, Any]) -> Give:
    def give(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
        for keywords in calls:
            step.backward(loss_of(model, rows), **keywords)

    return give


def both(first: Give, second: Give) -> Give:
    def give(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
        first(step, model, rows)
        second(step, model, rows)

    return give


def back_itself(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
    loss_of(model, rows).backward()


def hold(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
    step.hold(model(rows))


def sum_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(rows), rows[:, :1], reduction="sum")


def penalty_of(model: nn.Module) -> torch.Tensor:
    weight = next(model.parameters())  # (6, 4)
    return nn.functional.mse_loss(weight, torch.zeros_like(weight), reduction="sum")


def mean_matching(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(rows).mean(0), rows.mean(0)[:1], reduction="sum")


def entropy(ignored: int = 0, **options: Any) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Torch's cross-entropy of two classes, with the labels of the first rows ignored."""

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        output = model(rows)
        labels = torch.arange(len(rows), device=rows.device) % 2
        labels[:ignored] = -100
        there: dict[str, Any] = {
            name: option.to(rows.device) if isinstance(option, torch.Tensor) else option
            for name, option in options.items()
        }
        return nn.functional.cross_entropy(torch.cat([output, -output], 1), labels, **there)

    return loss


ONES = torch.ones(5, 1).double()
FIXED = torch.zeros(6, 4).double()


def last_of_each_ignored(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A mean over as many labels of each sample, as of all tokens of a text but its last one."""
    output = model(rows).repeat_interleave(3, 0)
    labels = torch.tensor([0, 1, -100]).repeat(len(rows))
    return nn.functional.cross_entropy(torch.cat([output, -output], 1), labels)


def packed(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A hook keeps other tensors than those that are saved."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return torch.tensor([len(kept) - 1])

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: kept[int(place)]):
        return entropy()(model, rows)


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        ctx.name = "the script's own"
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope


def giving(loss: Callable[[nn.Module, torch.Tensor], Any], **options: Any) -> Give:
    return lambda step, model, rows: step.backward(loss(model, rows), **options)


def fail_in_backward(step: dl.Step, model: nn.Sequential, rows: torch.Tensor) -> None:
    def run_out(module: nn.Module, given: object, received: object) -> None:
        raise MemoryError("out of memory in backward")

    hook = model[1].register_full_backward_hook(run_out)
    with suppress(MemoryError):
        backward(step, model, rows)
    hook.remove()


def each(give: Give, then: Act = lambda step, model: step.fold()) -> Act:
    def act(step: dl.Step, model: nn.Module) -> None:
        for rows in step:
            give(step, model, rows)
        then(step, model)

    return act


def gather(step: dl.Step, model: nn.Module) -> None:
    step.backward(spread(step.gather()))
    step.fold()


def both_of_all(step: dl.Step, model: nn.Module) -> None:
    for loss in [spread(step.gather())] * 2:
        step.backward(loss)


backward = calling({})
usual = each(backward)
holding = each(hold, gather)


def after(change: Callable[[Any], object], act: Act = usual) -> Act:
    def act_after(step: dl.Step, model: nn.Module) -> None:
        change(model)
        act(step, model)

    return act_after


def do_nothing(step: dl.Step, model: nn.Module, rows: object = None) -> None:
    pass


def unpack(step: Any, model: nn.Module) -> None:
    _, _ = step


def back_between(step: dl.Step, model: nn.Module) -> None:
    back_itself(step, model, samples(2))
    step.fold()


def transpose(model: nn.Sequential) -> None:
    weight = model[0].get_parameter("weight")
    weight.data = weight.data.t().contiguous().t()


@dataclass(frozen=True)
class Wrong:
    """What a script does in the third step, and the error's words and kind.

    `shards`: with which it runs; None for one on each rank, where rank 1 alone does it.
    """

    act: Act
    said: str
    kind: str = "RuntimeError"
    usual: Act = usual
    shards: tuple[int | None, ...] = (None,)


LEFT_OUT = (
    r"step\.backward must be called for every shard. Step 3 left out \[.*\] of its . shards"
    r".* weight=0 and the others weight= their number of samples, or with reduction=\"sum\" multiply its loss by 0"
)
OWN = r"model\.\d\.\w+ (got one from another backward|was taken away).*more_losses=True\).* torch\.autograd\.grad"
HOOKED = r"hook on a parameter.* model\.0\.weight has one of "
FORM = "A parameter's dtype and memory format must not change during training. model.0.weight had"
HELD = r"step\.hold must be called once for each shard, .* comes after another one"
SUM = r"This one is torch's sum .* over \d samples.* step\.backward\(loss, reduction=\"sum\"\) if the whole loss is"
ADDED_MEAN = r"torch's mean .* over \d samples.* Leave reduction= out .*or multiply this one by what it is over"
CLASS_WEIGHTS = r"mean by class weights: .* weight=class_weights\[labels\]\.sum\(\)"
BESIDE = r".* If another part .* step\.hold the sums and counts of both instead"
TWO = torch.tensor([1.0, 5.0], dtype=torch.float64)
OF_DATA = "ValueError|TypeError|AttributeError"
INNER_LOOP = r"A Loop yields steps, .* Write `for step in loop:`, and inside it `for images, labels in step:`"
WRONGS = {
    "continue": Wrong(each(do_nothing), LEFT_OUT),
    "a caught error": Wrong(each(fail_in_backward), f"{LEFT_OUT}|{OWN}"),
    "another try": Wrong(
        each(both(fail_in_backward, backward)), r"That of shard \d raised, and may have left parts", shards=(None, 6)
    ),
    "class weights": Wrong(each(giving(entropy(weight=TWO))), CLASS_WEIGHTS, "ValueError"),
    "a mean as a sum": Wrong(
        each(giving(entropy(2), reduction="sum")),
        ADDED_MEAN,
        "ValueError",
        each(giving(sum_of, reduction="sum")),
        (None, 3),
    ),
    "a mean beside a sum": Wrong(
        each(
            giving(
                lambda model, rows: sum_of(model, rows) + nn.functional.mse_loss(model(rows), 0 * rows[:, :1]),
                reduction="sum",
            )
        ),
        ADDED_MEAN,
        "ValueError",
        each(giving(sum_of, reduction="sum")),
    ),
    "no fold": Wrong(each(backward, do_nothing), "before the next one begins. Step 3 was left without it"),
    "its own backward before": Wrong(each(both(back_itself, backward)), OWN, shards=(None, 6)),
    "its own backward after": Wrong(each(both(backward, back_itself)), OWN, shards=(None, 6)),
    "its own backward between": Wrong(each(backward, back_between), OWN, shards=(None, 6)),
    "its own backward in a shard of weight 0": Wrong(each(both(back_itself, calling({"weight": 0}))), OWN),
    "its own backward alone": Wrong(each(back_itself), r"Replace loss\.backward\(\) by step\.backward\(loss\)\.$"),
    "a hook": Wrong(
        after(lambda model: model[0].weight.register_hook(torch.clone)),
        rf"{HOOKED}register_hook\..* after step\.fold\(\)",
        shards=(6,),
    ),
    "a hook after accumulation": Wrong(
        after(lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)),
        rf"{HOOKED}register_post_accumulate_grad_hook\..*optimizer in back",
        shards=(6,),
    ),
    "another dtype": Wrong(after(nn.Module.float), FORM),
    "other strides": Wrong(after(transpose), FORM),
    "unpacked": Wrong(unpack, INNER_LOOP, OF_DATA),
    "as a tensor": Wrong(lambda step, model: model(step), INNER_LOOP, OF_DATA),
    "hold nothing": Wrong(each(lambda step, *_: step.hold(), gather), "Got none. Pass at", "ValueError", holding),
    "hold a scalar": Wrong(
        each(lambda step, model, rows: step.hold(model(rows).mean()), gather),
        r"must have a row per sample, shape \(\d, ...\). Got \(\)",
        "ValueError",
        holding,
    ),
    "two losses of all": Wrong(
        each(hold, both_of_all),
        r"or again after step\.gather\. Add the loss to one that it is called with\.$",
        usual=holding,
    ),
    "hold without a loss": Wrong(each(hold), r"Step 3 held outputs, and has no loss of them\. After", shards=(6,)),
    "a weight of all": Wrong(
        each(hold, lambda step, model: step.backward(spread(step.gather()), weight=3)),
        "takes no weight, no reduction and no more_losses=",
        "ValueError",
        holding,
    ),
}
CALLS: list[tuple[Give, str]] = [
    (
        giving(lambda model, rows: model(rows).squeeze(1)),
        r"A loss must be a tensor of shape \(\).* Got shape \(6,\). Take its mean",
    ),
    (lambda step, model, rows: step.backward(3.0), r"Got float\. Pass the tensor itself, without \.item\(\)"),  # type: ignore[arg-type]
    (giving(lambda model, rows: loss_of(model, rows).detach()), "must need a gradient"),
    (giving(lambda model, rows: SimpleNamespace(loss=loss_of(model, rows))), r"Got SimpleNamespace\. Pass its \.loss"),
    (giving(sum_of), SUM),
    (giving(lambda model, rows: sum_of(model, rows) - 0.5 * penalty_of(model)), SUM),
    (giving(entropy(weight=TWO)), CLASS_WEIGHTS),
    (giving(entropy(weight=TWO, label_smoothing=0.1)), CLASS_WEIGHTS),
    (giving(lambda model, rows: entropy(weight=TWO)(model, rows) + penalty_of(model)), CLASS_WEIGHTS + BESIDE),
    (
        giving(lambda model, rows: 0.5 * entropy(2)(model, rows) + penalty_of(model) + penalty_of(model)),
        "mean over 4 of" + BESIDE,
    ),
    (both(calling({"more_losses": True}), giving(entropy(2))), "mean over 4 of a shard's 6 labels" + BESIDE),
    (both(calling({"more_losses": True}), giving(entropy(reduction="sum"))), SUM),
    (
        giving(lambda model, rows: entropy()(model, rows[:5])),
        r"mean over 5 labels, and the shard has 6 samples.*weight=5",
    ),
    (giving(lambda model, rows: nn.functional.mse_loss(model(rows[1:]), rows[1:, :1])), "mean over 5 values"),
    (giving(lambda model, rows: model(rows)[torch.arange(6) > 1].mean()), "mean over 4 selected values"),
    (giving(lambda model, rows: entropy(weight=TWO)(model, rows).float().mean()), CLASS_WEIGHTS),
    (
        giving(lambda model, rows: torch.stack([entropy(weight=TWO)(model, rows), penalty_of(model)]).sum()),
        CLASS_WEIGHTS,
    ),
    # As many for each sample of this shard tells nothing of the other shards.
    (
        giving(last_of_each_ignored),
        r"mean over 12 of a shard's 18 labels.* or weight=6",
    ),
    (
        giving(entropy(2)),
        r"mean over 4 of a shard's 6 labels, .* weight=\(labels != ignore_index\)\.sum\(\).* all the same\.$",
    ),
    *(
        (calling(keywords), said)
        for keywords, said in (
            ({"weight": -1.0}, r"or more. Got -1\.0"),
            ({"weight": nan}, "Got nan"),
            ({"weight": torch.ones(9)}, r"weight must be one value. Got shape \(9,\)"),
            ({"weight": "2"}, "weight must be a number"),
            ({"reduction": "none"}, '"mean" or "sum". Got \'none\''),
            ({"error": torch.ones(1, 1)}, r"A metric must be one value.*error has shape \(1, 1\)"),
            ({"error": torch.tensor(1j)}, r"A metric must be real\. error is torch\.complex64\. Take its \.abs"),
            ({"error": torch.ones(9)}, r"error has shape \(9,\)"),
            ({"error": "big"}, r"error is 'big'\. Convert it with torch\.as_tensor"),
            (
                {"metrics": {"error": 1.5}},
                r"metrics is \{'error': 1\.5\}\. Pass each .*step\.backward\(loss, \*\*metrics\)",
            ),
            ({"error": dl.Sum(1.0, over=2.0)}, "takes no dl.Sum with over=. error is one"),
            ({"retain_graph": True}, r"\['retain_graph'\].* more_losses=True keeps the graph"),
            ({"epoch": 3.0}, r"\['epoch'\].* Choose another one"),
            ({"wieght": 3.0}, "Got wieght. Did you mean weight?"),
            ({"reducton": "sum"}, "Got reducton. Did you mean reduction?"),
            ({"hits": 2}, r"hits is a whole number for 6 samples, as a count is\. .*dl\.Sum"),
            ({"hits": np.int64(2)}, "hits is a whole number"),
            ({"hits": torch.tensor([True, True]).sum()}, "hits is a whole number"),
        )
    ),
]


def go_wrong(
    world: dl.World, folder: str, act: Act, usual: Act, culprit: int, options: dict[str, Any], at: int = 3
) -> None:
    model = network()
    for step in loop_over(world, folder, model, **options):
        chosen = act if does_it(world, culprit) and step.iteration == at else usual
        chosen(step, model)


def do_wrong(world: dl.World, folder: str, how: str, culprit: int, shards: int | None) -> None:
    wrong = WRONGS[how]
    go_wrong(
        world, folder, wrong.act, wrong.usual, culprit, {"shards": shards, "bucket_cap_mib": 1e-5 if shards else 8}
    )


@pytest.mark.covers("D3", "D10", "D13")
@pytest.mark.parametrize(("how", "shards"), [(how, shards) for how, one in WRONGS.items() for shards in one.shards])
@pytest.mark.quick_on_gpus
def test_a_step_that_is_used_wrongly_is_refused_on_every_rank(how: str, shards: int | None, refused: Refused) -> None:
    wrong = WRONGS[how]
    culprit = ALL if shards else 1
    refused(2, do_wrong, how, culprit, shards, kind=wrong.kind, said=wrong.said, by=culprit)


def go_wrong_alone(folder: Path, act: Act) -> None:
    with dl.join_world() as world:
        go_wrong(world, str(folder), act, usual, ALL, {})


@pytest.mark.covers("D10")
@pytest.mark.parametrize(("give", "said"), CALLS)
def test_what_backward_cannot_take_is_refused(give: Give, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        go_wrong_alone(tmp_path, each(give))


@pytest.mark.parametrize(
    "give",
    [
        giving(lambda model, rows: loss_of(model, rows) + nn.functional.mse_loss(next(model.parameters()), FIXED)),
        giving(lambda model, rows: sum_of(model, rows) / len(rows)),
        giving(sum_of, reduction="sum"),
        giving(mean_matching),
        both(calling({"more_losses": True}), giving(lambda model, rows: penalty_of(model))),
        calling({"none": 0, "size": 1000, "flag": True, "one": 1}),
        giving(entropy()),
        giving(entropy(label_smoothing=0.1)),
        giving(entropy(2, weight=TWO), weight=torch.tensor(12.0)),
        giving(entropy(2, reduction="sum"), reduction="sum"),
        giving(lambda model, rows: entropy(reduction="sum")(model, rows) / len(rows)),
        giving(lambda model, rows: entropy()(model, rows[:5]), weight=5),
        giving(lambda model, rows: (entropy()(model, rows[:5]) * 5 + entropy()(model, rows[5:])) / 6),
        giving(lambda model, rows: entropy()(model, rows) + entropy()(model, rows[:5])),
        giving(lambda model, rows: torch.stack([entropy(1)(model, row.repeat(3, 1)) for row in rows[:, None]]).mean()),
        giving(packed),
        giving(lambda model, rows: torch.add(loss_of(model, rows), sum_of(model, rows), alpha=1 / len(rows))),
        giving(lambda model, rows: Named.apply(loss_of(model, rows))),  # type: ignore[no-untyped-call]
        both(calling({"more_losses": True}), giving(lambda model, rows: nn.functional.mse_loss(model(rows[:5]), ONES))),
        giving(lambda model, rows: entropy()(model, rows.repeat(2, 1))),
        giving(lambda model, rows: loss_of(model, rows) + penalty_of(model)),
    ],
)
def test_a_penalty_and_a_sum_that_is_divided_or_said_are_taken(give: Give, tmp_path: Path) -> None:
    go_wrong_alone(tmp_path, each(give))


@pytest.mark.parametrize(("loss", "said"), [(sum_of, SUM), (entropy(weight=TWO), CLASS_WEIGHTS)])
def test_a_scaler_hides_no_loss_that_backward_cannot_take(loss: LossOf, said: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=said):
        train(network(), lambda model, rows: scaler.scale(loss(model, rows)), state={"scaler": scaler})


@pytest.mark.covers("D3")
def test_a_backward_on_a_rank_without_a_shard_is_refused_there(refused: Refused) -> None:
    refused(2, be_without, kind="RuntimeError", said=OWN, by=1)


def be_without(world: dl.World, folder: str) -> None:
    go_wrong(world, folder, each(backward, back_between), usual, 1, {"count": 1}, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [(-2.0,), (nan,), (2.0, 3.0)])
def test_a_wrong_weight_in_a_tensor_is_refused_on_a_gpu_one_step_later(
    weights: tuple[float, ...], reduction: Reduction, late: bool, refused: Refused
) -> None:
    said = "weight must be a finite number, 0 or more. Got|same weight. Got 3.* after 2"
    if late:
        said = r"The loss of step 3 is [\w.]+\. Look at the weights: each"
    kind = "FloatingPointError" if late else "ValueError"
    refused(2, weigh_wrongly, weights, reduction, kind=kind, said=said, by=ALL if late else 1)


def weighing(reduction: Reduction, *weights: float) -> Act:
    def give(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
        for left, weight in enumerate(weights, 1 - len(weights)):
            loss = sum_of(model, rows) if reduction == "sum" else loss_of(model, rows)
            step.backward(loss, weight=torch.tensor(weight), reduction=reduction, more_losses=left < 0)

    return each(give)


def weigh_wrongly(world: dl.World, folder: str, weights: tuple[float, ...], reduction: Reduction) -> None:
    go_wrong(world, folder, weighing(reduction, *weights), weighing(reduction, 2.0), 1, {})


# -- steps that are left -------------------------------------------------------------------------------------------


LEFT: dict[str, tuple[Act, Act]] = {  # what ranks do in a step, and the last act of the one that leaves
    "before the shards": (usual, do_nothing),
    "after the last backward": (usual, each(backward, do_nothing)),  # when its sums have begun
    "where others gather": (holding, do_nothing),
    "between gather and fold": (holding, each(hold, lambda step, model: step.gather())),
    "after the fold": (usual, usual),
}


def leave_early(world: dl.World, folder: str, where: str, culprit: int, then: str, at: int = 3) -> None:
    """In small buckets; rank 3 has no shard. After step 13 shares are measured, and the next fold is another."""
    act, last = LEFT[where]
    model = network()
    options: dict[str, Any] = {"shards": 3} if world.size == 4 else {"shards": 4, "shares": "measured"}
    for step in loop_over(world, folder, model, count=96, bucket_cap_mib=1e-4, **options):
        if does_it(world, culprit) and step.iteration == at:
            last(step, model)
            break
        act(step, model)
    if then == "evaluate":
        dl.evaluate(model, dl.Batches(samples(6), 3, world), mean=mean_of)


@pytest.mark.covers("D10", "D13")
@pytest.mark.parametrize(
    ("where", "at", "ranks", "culprit", "then"),
    [
        ("before the shards", 1, 2, 0, "evaluate"),
        ("after the last backward", 2, 2, 1, "evaluate"),
        ("after the last backward", 12, 3, 1, ""),
        ("where others gather", 12, 4, 3, ""),
        ("after the fold", 13, 2, 1, "evaluate"),
        ("after the fold", 13, 3, 1, ""),
        ("between gather and fold", 14, 2, 0, "evaluate"),
    ],
)
@pytest.mark.slow
def test_one_rank_that_leaves_the_loop_alone_ends_all_with_an_error(
    where: str, at: int, ranks: int, culprit: int, then: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    results = on_ranks(ranks, on_this_rank, leave_early, str(tmp_path / "run"), (where, culprit, then, at))
    leaver = results.pop(culprit)
    assert then or leaver.kind == ""  # a break is no error where it is made
    for result in results:
        assert result.kind == "PeerFailed", result
        assert then or f"it left the loop in step {at}" in result.text, result
        assert result.took_s < MOST_S


@pytest.mark.parametrize("then", ["evaluate", "end"])
def test_all_ranks_may_leave_the_loop_early_together(then: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    results = on_ranks(2, on_this_rank, leave_early, str(tmp_path / "run"), ("before the shards", ALL, then))
    assert [result.kind for result in results] == ["", ""], results
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 2


def evaluate_inside(world: dl.World, folder: str, where: str) -> None:
    model = network()
    test = dl.Batches(samples(5), 2, world, shuffle=False)
    for step in loop_over(world, folder, model, count=19, bucket_cap_mib=1e-5):
        for rows in step:
            if where == "in the shard":
                dl.evaluate(model, test, mean=mean_of)
            backward(step, model, rows)
        dl.evaluate(model, test, mean=mean_of)


@pytest.mark.parametrize("where", ["in the shard", "before fold"])
def test_evaluation_inside_of_an_unfolded_step_is_refused_where_ranks_could_be_at_different_places(
    where: str, refused: Refused
) -> None:
    refused(3, evaluate_inside, where, kind="RuntimeError", said="fold", by=None)


def fail(*_: object) -> None:
    raise TypeError("the script's own")


@pytest.mark.parametrize("act", [fail, each(fail), each(backward, lambda step, model: fail(step.fold()))])
def test_other_errors_of_a_script_get_no_remedy(act: Act, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"the script's own$") as error:
        go_wrong_alone(tmp_path, act)
    assert not any("A Loop yields" in note for note in getattr(error.value, "__notes__", []))
