"""Losses whose result follows the cut of a mini-batch, found by runs in which it is cut otherwise.

[Note: Halved shards] Fixed shards give the same bits on all numbers of ranks, whatever the loss is. So one more run
cuts each shard into two, and uses the gradients of the run before it, so that both have the same parameters in each
step. Let a shard have the loss l and the gradient g, both before any weight, and its halves l_1, g_1 and l_2, g_2:

- l = l_1 + l_2, g = g_1 + g_2: the loss is a sum;
- l = u_1 l_1 + u_2 l_2, g = u_1 g_1 + u_2 g_2, u_1 + u_2 = 1: it is a mean, over what the u are shares of;
- l_1 + l_2 - l and g_1 + g_2 - g are the same for every shard, though the shards are not: it is a sum beside a term
  that does not depend on the samples;
- l = u_1 l_1 + u_2 l_2, g = u_1 g_1 + u_2 g_2, each u_i the power 1 - p of its half's share of the samples: it is the
  mean of n samples times n ** p.

Each must hold for every shard, in the loss and in thousands of elements of the gradients. Batch norm, dropout, losses
over pairs of samples and mixed precision fit none of them, and only the sizes of losses and gradients are left. They
follow the size of the shard in a sum and not in a mean; large shards alone are judged so, since a contrastive loss of a
few samples grows with them, too.

If no reason is found, small mini-batches are cut in two more ways. A run with each mini-batch in one shard shows a
sum by the sizes, since a mini-batch is several times its shards. And a run with shards of one sample shows a sum beside
a mean: c l + sum_i(c_i l_i) + sum_j(c_j l_j) is 0 for such a loss l of a shard, l_i of its halves and l_j of its
samples, if for each sample the factors of what it is in add up to 0, and so do the factors divided by their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log

import torch

from ddp_loop.tracing.compare import rounding_of
from ddp_loop.tracing.diagnosis import folded_values, split_name
from ddp_loop.tracing.trace import Trace

_EXACT = 1e-6  # the allowed error of a metric, relative to it
_FITS = 1e-3  # the allowed remainder, relative to the value
_SAME = 1e-2  # the allowed difference of what must be the same in every shard, and of two weights
_NEAR = 0.02  # the allowed error of a sum of fitted weights
_ABOUT = 0.2, 0.4  # the allowed errors of the ratio of losses and of gradients, with random numbers
_FAR = 0.67  # the allowed ratio of log n to k log(n / k), for n samples in k pieces; so halves need 16 samples
_FEW = 64  # the most samples of a mini-batch that is cut in more ways: it must fit one shard
_TWO_ROWS = 4  # samples of a shard with two in each half; single gradients span too much
_ELEMENTS = 8  # the fewest elements of a gradient that a relation must fit

ADDS = (
    "a shard's loss is about the sum of the losses of its parts, and so are its gradients, but the loss is given as a "
    "mean. So the loss is a sum over the shard's samples, or it is weighted by hand, such as loss * len(inputs) / "
    'step.samples. Pass a sum as step.backward(loss, reduction="sum"), and a mean without a weight of your own; a mean '
    "over tokens or boxes gets weight=, their number."
)
AVERAGES = (
    "a shard's loss is about the mean of the losses of its parts, and so are its gradients, but the loss is given as "
    'a sum. Pass the mean as step.backward(loss), without reduction="sum".'
)
WEIGHS = (
    "the loss and the gradients of shard {number} are those of its halves with the weights {weights}, but the halves "
    "count {shares}. Is the loss a mean over something other than the samples (tokens, boxes)? Then give weight=, the "
    "shard's number of them, to step.backward."
)
PENALTY = (
    "a part of the loss does not depend on the samples, such as a penalty on the parameters. Beside a loss with "
    'reduction="sum" it counts once per shard. Multiply it by len(inputs) / step.samples, so that it counts once per '
    "mini-batch."
)
POWER = (
    "the loss of a shard with n samples is the mean over them times n ** {power:.2g}, and so are its gradients, but it "
    "is given as a {reduction}. Pass the mean as step.backward(loss), or the sum as "
    'step.backward(loss, reduction="sum"), without a factor of your own.'
)
MIXED = (
    "one part of a shard's loss is a sum over its samples, and another part is their mean, such as entropy.sum() "
    "beside F.cross_entropy(...). Take the mean of both and pass it as step.backward(loss), or the sum of both with "
    'reduction="sum".'
)
METRIC = (
    "the metric `{name}` of a shard is the sum of the metrics of its halves, but it is given as a mean. Pass a sum as "
    "dl.Sum({name}), and a mean as the shard's mean."
)


@dataclass
class _Piece:
    """What a shard, or a part of a shard, gave: its values are by reduction and name."""

    samples: int = 0
    weight: float = 0.0
    values: dict[tuple[str, str], float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def reduction(self) -> str | None:
        """Of the loss; None without a loss of the shard's own."""
        return next((reduction for reduction, name in self.values if name == "loss"), None)


@dataclass(frozen=True)
class _Pair:
    """A shard and its k parts: their losses (1 + k,) and gradients (1 + k, elements) before any weight.

    Attributes:
        number: of the shard.
        losses, gradients: of the shard, then of its parts; those are halves but for mini-batches in one shard.
        by_samples: the parts' shares of the shard's samples.
        counts: the parts' shares in what the shard counts, as they were given.
        samples: of the shard.
    """

    number: int
    losses: torch.Tensor
    gradients: torch.Tensor
    by_samples: torch.Tensor
    counts: torch.Tensor
    samples: int

    def fits(self, factors: torch.Tensor) -> bool:
        """Whether the shard's loss and gradients are its parts' times the factors, (k,)."""
        expected = factors @ self.gradients[1:]
        size = max(float(self.gradients[0].norm()), float(expected.norm()))
        of_losses = factors * self.losses[1:]
        scale = max(abs(float(self.losses[0])), float(of_losses.abs().sum()))
        is_loss = abs(float(self.losses[0] - of_losses.sum())) <= _FITS * scale
        return is_loss and float((self.gradients[0] - expected).norm()) <= _FITS * size

    @property
    def adds_up(self) -> bool:
        """Whether the shard's loss and gradients are the sums of its parts'."""
        return self.fits(torch.ones_like(self.counts))

    @property
    def is_large(self) -> bool:
        """Whether a sum's growth from the parts to the shard is far above that of a logarithm."""
        return _is_large(self.samples, len(self.counts))

    def fitted(self) -> torch.Tensor | None:
        """The factors of two halves, (2,), that fit the gradients best; None if many do."""
        halves = self.gradients[1:]
        unit = halves / halves.norm(dim=1, keepdim=True)
        if abs(float(unit[0] @ unit[1])) > 1 - _SAME:
            return None
        factors: torch.Tensor = torch.linalg.lstsq(halves.T, self.gradients[0].unsqueeze(1), driver="gelsd").solution
        return factors[:, 0]

    def excess(self) -> torch.Tensor:
        """What the halves' sum has more than the shard: of the gradients, then of the loss; (elements + 1,)."""
        gradient = self.gradients[1:].sum(0) - self.gradients[0]
        return torch.cat([gradient, (self.losses[1:].sum() - self.losses[0]).reshape(1)])


def _is_large(samples: int, parts: int) -> bool:
    return parts < samples and log(samples) < _FAR * parts * log(samples / parts)


def is_small(trace: Trace) -> bool:
    """Whether the first mini-batch may be cut in more ways. See [Note: Halved shards]."""
    return _first_samples(trace) <= _FEW


def is_judged_whole(trace: Trace) -> bool:
    """Whether the first mini-batch in one shard shows a sum that is given as a mean, or a mean as a sum."""
    return trace.head["shards"] > 2 and is_small(trace) and _is_large(_first_samples(trace), trace.head["shards"])


def _first_samples(trace: Trace) -> int:
    first = next(iter(_pieces(trace, trace.numbers[1]).values()), {}) if trace.numbers[1:] else {}
    return sum(piece.samples for piece in first.values())


def explain_halves(one: Trace, halved: Trace) -> str | None:
    """The reason why a result of the script follows the cut of its mini-batches; None if no reason is found.

    See [Note: Halved shards].

    Args:
        one: the trace of a Loop, with values.
        halved: its trace with each shard cut into two or more; both have the same parameters.
    """
    floor = 0.1 * rounding_of(one)
    for step in halved.numbers[1:]:
        if step not in one.numbers:
            return None
        shards = _pieces(one, step)
        halves = _pieces(halved, step)
        for turn in shards:
            if turn in halves:
                alone = one.head["shards"] == 1
                pairs = _pairs(shards[turn], halves[turn], alone=alone)
                reason = _of_loss(pairs, shards[turn], floor) or _of_metrics(shards[turn], halves[turn])
                if reason is not None:
                    return f"In step {step}, {turn}{reason}"
    return None


def explain_singles(one: Trace, halved: Trace, singles: Trace) -> str | None:
    """The reason if a loss is a sum beside a mean; None if it is not. See [Note: Halved shards].

    Args:
        one: the trace of a Loop, with values.
        halved: its trace with each shard cut into two, and with the gradients of `one`.
        singles: its trace with shards of one sample, and with the gradients of `one`.
    """
    for step in singles.numbers[1:]:
        if step not in one.numbers or step not in halved.numbers:
            return None
        cuts = [_pieces(trace, step) for trace in (one, halved, singles)]
        for turn in cuts[0]:
            if all(turn in cut for cut in cuts):
                shards, halves, samples = (cut[turn] for cut in cuts)
                alone = one.head["shards"] == 1
                of_samples = {pair.number: pair for pair in _pairs(shards, samples, alone=alone)}
                pairs = [pair for pair in _pairs(shards, halves, alone=alone) if pair.number in of_samples]
                if pairs and all(_is_mixed(pair, of_samples[pair.number]) for pair in pairs):
                    return f"In step {step}, {turn}{MIXED}"
    return None


def _is_mixed(pair: _Pair, of_samples: _Pair) -> bool:
    """Whether a shard's loss is a sum beside a mean, by its halves and by its samples."""
    sizes = (pair.by_samples * pair.samples).round()
    if int(sizes.min()) < 2 or pair.gradients.shape[1] != of_samples.gradients.shape[1]:
        return False
    of_halves = (1 / pair.samples - 1) / (1 - 1 / sizes)
    factors = torch.cat([sizes.new_ones(1), of_halves, (-1 - of_halves).repeat_interleave(sizes.long())])
    gradients = factors @ torch.cat([pair.gradients, of_samples.gradients[1:]])
    losses = factors * torch.cat([pair.losses, of_samples.losses[1:]])
    plain = pair.by_samples, torch.ones_like(sizes)  # of a mean alone, and of a sum
    nearest = min(float((pair.gradients[0] - one @ pair.gradients[1:]).norm()) for one in plain)
    is_loss = abs(float(losses.sum())) <= _FITS * float(losses.abs().sum())
    return is_loss and nearest > _FITS * float(pair.gradients[0].norm()) and float(gradients.norm()) <= _SAME * nearest


def difference_of_halves(one: Trace, halved: Trace) -> float:
    """The difference of the first step's gradients, relative to their size; 0 if it is rounding."""
    if not (one.numbers[1:] and halved.numbers[1:]):
        return 0.0
    step = one.numbers[1]
    (_, here), (_, there) = (folded_values(trace, step, "") for trace in (one, halved))
    if len(here) != len(there) or not float(here.norm()):
        return 0.0
    difference = float((here - there).norm() / here.norm())
    return difference if difference > _FITS else 0.0


def is_given_as_sum(trace: Trace, step: int) -> bool:
    """Whether a loss of a step is given with reduction="sum"."""
    return any(key.endswith(", sum of loss") for key in trace.of_shards(step))


def _pieces(trace: Trace, step: int) -> dict[str, dict[int, _Piece]]:
    """The shards of each pass."""
    found: dict[str, dict[int, _Piece]] = {}
    for key, value in trace.of_shards(step).items():
        stage, _, name = key.partition(": ")
        if stage == "data":
            continue
        turn, number, what = split_name(name)
        piece = found.setdefault(turn, {}).setdefault(number, _Piece())
        reduction, _, of = what.partition(" of ")
        if stage == "backward":
            piece.gradients[what] = value
        elif what == "weight":
            piece.weight = float(value)
        elif what == "samples":
            piece.samples = int(value)
        else:
            piece.values[reduction, of] = float(value)
    return found


def _cut_shards(shards: Mapping[int, _Piece], pieces: Mapping[int, _Piece]) -> list[tuple[int, list[_Piece]]]:
    """The number of each shard that is cut into pieces, with the shard and its pieces, by the places of the samples."""
    starts = _starts(shards)
    starts_of_pieces = _starts(pieces)
    found = []
    for number, shard in sorted(shards.items()):
        within = range(starts[number], starts[number] + shard.samples)
        parts = [pieces[piece] for piece, start in starts_of_pieces.items() if start in within]
        is_whole = within.start in starts_of_pieces.values() and sum(part.samples for part in parts) == shard.samples
        if is_whole and len(parts) > 1:
            found.append((number, [shard, *parts]))
    return found


def _starts(pieces: Mapping[int, _Piece]) -> dict[int, int]:
    """The number of samples before each piece of a mini-batch."""
    numbers = sorted(pieces)
    return dict(zip(numbers, accumulate((pieces[number].samples for number in numbers), initial=0), strict=False))


def _pairs(shards: Mapping[int, _Piece], parts: Mapping[int, _Piece], *, alone: bool) -> list[_Pair]:
    """The shards whose loss and gradients are known, and their parts' too; `alone` for one shard."""
    pieces = *shards.values(), *parts.values()
    nothing = {name: torch.zeros_like(one) for piece in pieces for name, one in sorted(piece.gradients.items())}
    samples = sum(shard.samples for shard in shards.values())
    all_weights = [sum(piece.weight for piece in cut.values()) for cut in (shards, parts)]
    pairs = []
    for number, all_pieces in _cut_shards(shards, parts):
        shard = all_pieces[0]
        reduction = shard.reduction
        losses = [piece.values.get((reduction or "", "loss")) for piece in all_pieces]
        if None in losses or not all(piece.weight > 0 for piece in all_pieces):
            continue
        # A mean was multiplied by its weight before backward, but for an only shard's.
        factors = [1.0 if reduction == "sum" else piece.weight / samples for piece in all_pieces]
        factors[0] = 1.0 if alone else factors[0]
        rows = [_vector(piece, nothing) / factor for piece, factor in zip(all_pieces, factors, strict=True)]
        gradients = torch.stack(rows)
        if gradients.shape[1] < _ELEMENTS or not gradients.isfinite().all() or not gradients.norm(dim=1).all():
            continue
        own = all_pieces[1:]
        by_samples = _vector_of([piece.samples / shard.samples for piece in own])
        counts = _vector_of([piece.weight / all_weights[1] for piece in own]) / (shard.weight / all_weights[0])
        pairs.append(_Pair(number, _vector_of(losses), gradients, by_samples, counts, shard.samples))
    return pairs


def _vector_of(numbers: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _vector(piece: _Piece, nothing: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradients of a piece, one after the other; 0 where it has none."""
    parts = [piece.gradients.get(name, nothing[name]) for name in sorted(nothing)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")


# -- reasons -----------------------------------------------------------------------------------------------


def _of_loss(pairs: list[_Pair], shards: Mapping[int, _Piece], floor: float) -> str | None:
    if not pairs:
        return None
    if shards[pairs[0].number].reduction == "sum":
        return _of_sum(pairs, floor)
    return _of_mean(pairs)


def _of_sum(pairs: list[_Pair], floor: float) -> str | None:
    """The reason why a loss that is given as a sum is none; None if it is, or if none is found."""
    if _has_penalty(pairs, floor):
        return PENALTY
    if all(pair.adds_up for pair in pairs):
        return None
    if all(pair.fits(pair.by_samples) for pair in pairs) or _have_ratio(pairs, adds=False):
        return AVERAGES
    return _of_power(_fitted(pairs), "sum")


def _of_mean(pairs: list[_Pair]) -> str | None:
    """The reason why a loss that is given as a mean is no mean over its weight; None if it is, or none is found."""
    if all(pair.fits(pair.counts) for pair in pairs):
        return None
    if all(pair.adds_up for pair in pairs) or _have_ratio(pairs, adds=True):
        return ADDS
    means = _fitted(pairs)
    if any(abs(float(factors.sum()) - 1) >= _NEAR for _, factors in means):
        return _of_power(means, "mean")
    for pair, factors in means:
        if bool(((factors - pair.counts).abs() > _SAME).any()):
            texts = [" and ".join(f"{one:.3g}" for one in each.tolist()) for each in (factors, pair.counts)]
            return WEIGHS.format(number=pair.number, weights=texts[0], shares=texts[1])
    return None


def _fitted(pairs: list[_Pair]) -> list[tuple[_Pair, torch.Tensor]]:
    """The shards with two halves and the factors that fit them; empty if one has no such factors."""
    halved = [pair for pair in pairs if pair.samples >= _TWO_ROWS and len(pair.counts) == 2]
    fitted = [(pair, factors) for pair in halved if (factors := pair.fitted()) is not None]
    fit = all(pair.fits(factors) and bool((factors > -_NEAR).all()) for pair, factors in fitted)
    return fitted if fit else []


def _of_power(fitted: list[tuple[_Pair, torch.Tensor]], reduction: str) -> str | None:
    """The reason if losses are the means times a power of the number of samples; None if they are not."""
    if not fitted:
        return None
    powers = torch.cat([1 - factors.clamp(min=_EXACT).log() / pair.by_samples.log() for pair, factors in fitted])
    is_one = float(powers.max() - powers.min()) < _NEAR
    return POWER.format(power=float(powers.mean()), reduction=reduction) if is_one else None


def _has_penalty(pairs: list[_Pair], floor: float) -> bool:
    """Whether the halves have the same excess in every shard, though the shards have different gradients."""
    if len(pairs) < 2:
        return False
    excess = torch.stack([pair.excess() for pair in pairs])
    gradients = excess[:, :-1]
    losses = excess[:, -1]
    own = torch.stack([pair.gradients[0] for pair in pairs])
    size = gradients.mean(0).norm()
    largest = max(float(pair.gradients.norm(dim=1).max()) for pair in pairs)
    are_same = bool(((gradients - gradients.mean(0)).norm(dim=1) <= _SAME * size).all())
    differ = bool(((own - own.mean(0)).norm(dim=1) > _SAME * own.mean(0).norm()).any())
    rounding = max(floor, 1e-12) * max(float(pair.losses.abs().max()) for pair in pairs)
    have_same = bool(((losses - losses.mean()).abs() <= _SAME * losses.mean().abs() + rounding).all())
    return are_same and differ and have_same and float(size) > floor * largest


def _have_ratio(pairs: list[_Pair], *, adds: bool) -> bool:
    """Whether losses and gradients of large shards are about the sum of their parts', or the mean."""
    large = [pair for pair in pairs if pair.is_large]
    if sum(len(pair.counts) - 1 for pair in large) < 2:  # a single cut may have the ratio by chance
        return False
    expected = 1.0 if adds else 1 / len(large[0].counts)
    ratios = [float(pair.losses[0] / pair.losses[1:].sum()) / expected for pair in large]
    of_all = torch.stack([pair.gradients for pair in large]).sum(0)
    of_gradients = float(of_all[0].norm() / of_all[1:].sum(0).norm()) / expected
    return all(abs(ratio - 1) < _ABOUT[0] for ratio in ratios) and abs(of_gradients - 1) < _ABOUT[1]


def _of_metrics(shards: Mapping[int, _Piece], halves: Mapping[int, _Piece]) -> str | None:
    """The first metric that is given as a mean and adds up in every shard, in two shards of more than zeros."""
    names = dict.fromkeys(name for shard in shards.values() for reduction, name in shard.values if reduction == "mean")
    for name in names:
        cut = [pieces for _, pieces in _cut_shards(shards, halves) if len(pieces) == 3]
        values = [[piece.values.get(("mean", name)) for piece in pieces] for pieces in cut]
        found = [[one for one in three if one is not None] for three in values]
        if name == "loss" or any(len(three) < 3 for three in found):
            continue
        adds = all(abs(whole - one - two) <= _EXACT * abs(whole) for whole, one, two in found)
        if adds and sum(all(three) for three in found) >= 2:
            return METRIC.format(name=name)
    return None
