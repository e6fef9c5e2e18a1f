"""The reason why two runs whose mini-batches are cut otherwise differ: other samples, or a loss that follows the cut.

[Note: Diagnosis] Let shard s have the share a_s of the mini-batch, and let it add a_s g_s to the gradient. If there are
u_s for which sum_s(u_s g_s) is the gradient of the other run, then the losses are the same function with other weights.
If the sum of all u_s is 1, the loss is a mean over something other than the samples. If it is the ratio of the numbers
of shards, the loss is a sum over the samples, or was divided by the ranks. With random numbers in the shards no such
u_s exist; then a loss and gradients that both have about that ratio indicate the same.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log

import torch

from ddp_loop.distributed import as_real
from ddp_loop.tracing.compare import Mismatch, rounding_of
from ddp_loop.tracing.sample_sums import WHOLE, first_other
from ddp_loop.tracing.trace import Trace

_EXACT = 1e-6  # the allowed error of a metric, relative to it
_FITS = 1e-3  # the allowed remainder, relative to the value or the gradient
_SAME = 1e-2  # the allowed difference of what must be the same in every shard, and of two weights
_NEAR = 0.02  # the allowed error of a sum of fitted weights, and of a fitted ratio
_ABOUT = 0.2, 0.4  # the allowed errors of the ratio of losses and of gradients, with random numbers
_FAR = 0.67  # the allowed ratio of log n to k log(n / k), for n samples in k pieces; so halves need 16 samples
_FEW = 64  # the most samples of a mini-batch that is cut in more ways: it must fit one shard
_TWO_ROWS = 4  # samples of a shard with two in each half; single gradients span too much
_MOST = 4096  # elements of a gradient that are kept
_ELEMENTS = 8  # the fewest elements of a gradient that a relation must fit

_RATIOS = (
    " A ratio of two sums over the mini-batch, such as Dice, has no such number: hold what it needs by step.hold, and "
    "divide after step.gather (docs/migrate.md)."
)
SCALES = (
    "{found}: a loss that scales with the shard, since it is a sum over its samples, or was weighted by hand (loss * "
    "len(inputs) / step.samples), or divided by the number of ranks. Pass a sum as "
    'step.backward(loss, reduction="sum"), or divide it by the shard\'s samples, loss / len(inputs). Pass a mean '
    "without a weight of your own, and a mean over tokens or boxes with weight=, their number. Never divide a loss by "
    "the ranks."
)
GROWS = (
    '{found}: a loss that grows with the number of shards, since it is a mean passed with reduction="sum", or was '
    "multiplied by the number of ranks. Pass the shard's mean to step.backward(loss), or its sum with "
    'reduction="sum".'
)
WEIGHS = (
    "The shards' gradients give those of the other run with the weights {weights}; the weights by samples are "
    "{shares}. Is the loss a mean over something other than the samples (tokens, boxes)? Then give weight=, the "
    "shard's number of them, to step.backward." + _RATIOS
)


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
WEIGHS_PARTS = (
    "shard {number} has the loss and the gradients that its halves give with the weights {weights}, but the halves "
    "count {shares}. Is the loss a mean over something other than the samples (tokens, boxes)? Then give weight=, the "
    "shard's number of them, to step.backward." + _RATIOS
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


# -- the shards of a trace ---------------------------------------------------------------------------------


@dataclass
class _Piece:
    """What a shard, or a part of a shard, gave: its values are by reduction and name."""

    samples: int = 0
    weight: float = 0.0
    values: dict[tuple[str, str], float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    sample_sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def reduction(self) -> str | None:
        """Of the loss; None without a loss of the shard's own."""
        return next((reduction for reduction, name in self.values if name == "loss"), None)


_Cut = Mapping[int, _Piece]  # the shards of a pass, by their numbers


def _pieces(trace: Trace, step: int) -> dict[str, dict[int, _Piece]]:
    """The shards of each pass; entries are named as `pass 2, shard 3, loss`."""
    found: dict[str, dict[int, _Piece]] = {}
    for (stage, name), value in trace.of_shards(step).items():
        turn, _, rest = name.partition("shard ")
        number, _, what = rest.partition(", ")
        piece = found.setdefault(turn, {}).setdefault(int(number), _Piece())
        if stage == "data":
            piece.sample_sums[what] = value
        elif stage == "backward":
            piece.gradients[what] = value
        elif what == "weight":
            piece.weight = float(value)
        elif what == "samples":
            piece.samples = int(value)
        else:
            reduction, _, of = what.partition(" of ")
            piece.values[reduction, of] = float(value)
    return found


def _cuts(*traces: Trace) -> Iterator[tuple[int, str, list[dict[int, _Piece]]]]:
    """The step, the pass, and the shards in each trace, as far as all traces have them."""
    for step in traces[-1].numbers[1:]:
        if not all(step in trace.numbers for trace in traces):
            return
        cuts = [_pieces(trace, step) for trace in traces]
        for turn in cuts[0]:
            if all(turn in cut for cut in cuts):
                yield step, turn, [cut[turn] for cut in cuts]


def sparse_part(gradient: torch.Tensor) -> torch.Tensor:
    """Some elements of a gradient, float64 on the CPU: enough to find linear relations between gradients."""
    flat = gradient.detach().reshape(-1)
    flat = flat[:: max(1, -(-len(flat) // _MOST))].to("cpu")
    return as_real(flat).reshape(-1).to(torch.float64, copy=True)


def _folded(trace: Trace, step: int, turn: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mini-batch's loss, and `sparse_part` of its gradients."""
    values = trace.values(step)
    begin = f"{turn}gradient of "
    names = sorted(name for stage, name in values if stage == "fold" and name.startswith(begin))
    gradients = [sparse_part(values["fold", name]) for name in names]
    return values["fold", f"{turn}loss"].double(), torch.cat([_vector_of([]), *gradients])


def _vector_of(numbers: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _vectors(pieces: Sequence[_Piece], among: Iterable[_Piece]) -> torch.Tensor:
    """The gradients of each piece, one after the other, (pieces, elements); 0 where it has none that others have."""
    nothing = {name: torch.zeros_like(one) for piece in among for name, one in piece.gradients.items()}
    rows = [[piece.gradients.get(name, nothing[name]) for name in sorted(nothing)] for piece in pieces]
    return torch.stack([torch.cat([_vector_of([]), *row]) for row in rows])


def _fit(rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The factors by which the rows, (k, elements), come closest to the whole, (elements,)."""
    factors: torch.Tensor = torch.linalg.lstsq(rows.T, whole.unsqueeze(1), driver="gelsd").solution
    return factors[:, 0]


# -- two runs of a script ----------------------------------------------------------------------------------


def other_sample(one: Trace, other: Trace) -> tuple[Mismatch | None, bool]:
    """The first sample of two runs that differs by more than rounding, and whether it is in an integer tensor."""
    for step, turn, cuts in _cuts(one, other):
        here, there = map(_sample_sums, cuts)
        for name, sums in here.items():
            number = first_other(sums, there[name]) if name in there else None
            if number is not None:
                where = f"{turn}{name}, sample {number} of the mini-batch"
                return Mismatch(where, step, "data"), bool(sums[number, WHOLE])
    return None, False


def _sample_sums(shards: _Cut) -> dict[str, torch.Tensor]:
    """The sums of a mini-batch's samples, by part, without parts that a shard lacks."""
    rows = [shards[number].sample_sums for number in sorted(shards) if shards[number].sample_sums]
    names = [name for name in next(iter(rows), {}) if all(name in each for each in rows)]
    return {name: torch.cat([each[name] for each in rows]) for name in names}


def explain_loss(one: Trace, other: Trace, step: int, turn: str) -> str | None:
    """The reason why the folded loss differs, from the shards' losses and gradients; None if unknown.

    See [Note: Diagnosis].

    Args:
        one: the trace of a run, with values.
        other: another one's.
        step: in which the fold differs.
        turn: the prefix of the names of a pass, such as "pass 2, ".
    """
    one, other = sorted((one, other), key=lambda trace: int(trace.head["shards"]))  # the weights are of more shards
    few = one.head["shards"]
    many = other.head["shards"]
    if few == many:
        return None
    loss, gradient = _folded(one, step, turn)
    other_loss, other_gradient = _folded(other, step, turn)
    ratios = float(other_loss / loss), float(other_gradient.norm() / gradient.norm())
    found = f"The mini-batch's loss in {many} shards is {ratios[0]:.3g} of that in {few}, and the gradients follow it"
    shards = _pieces(other, step).get(turn, {})
    weighty = [shards[number] for number in sorted(shards) if shards[number].weight and shards[number].gradients]
    if len(weighty) > 1:
        parts = _vectors(weighty, shards.values())
        shares = _vector_of([piece.weight for piece in weighty])
        shares = shares / shares.sum()
        if parts.shape[1] == len(gradient):
            factors = _fit(parts, gradient)
            if float((factors @ parts - gradient).norm() / gradient.norm()) < _FITS:
                reason = _of_weights(factors * shares, shares, many / few, found)
                if reason is not None:
                    return reason
    for ratio, text in ((few / many, SCALES), (many / few, GROWS)):
        if all(abs(each / ratio - 1) < about for each, about in zip(ratios, _ABOUT, strict=True)):
            return text.format(found=found)
    return None


def _of_weights(weights: torch.Tensor, shares: torch.Tensor, ratio: float, found: str) -> str | None:
    """The reason given by weights u_s that fit the other run; None if they are the shares."""
    total = float(weights.sum())
    for expected, text in ((ratio, SCALES), (1 / ratio, GROWS)):
        if abs(total / expected - 1) < _NEAR:
            return text.format(found=found)
    if abs(total - 1) < _NEAR and bool((weights > -_NEAR).all()) and bool(((weights - shares).abs() > _FITS).any()):
        texts = [", ".join(f"{one:.3g}" for one in each.tolist()) for each in (weights, shares)]
        return WEIGHS.format(weights=texts[0], shares=texts[1])
    return None


# -- a run and one with halved shards ----------------------------------------------------------------------


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


def _is_large(samples: int, parts: int) -> bool:
    """Whether a sum's growth from the parts to the shard is far above a logarithm's."""
    return parts < samples and log(samples) < _FAR * parts * log(samples / parts)


def is_small(trace: Trace) -> bool:
    """Whether the first mini-batch may be cut in more ways. See [Note: Halved shards]."""
    return _first_samples(trace) <= _FEW


def is_judged_whole(trace: Trace) -> bool:
    """Whether the first mini-batch in one shard shows a sum that is given as a mean, or a mean as a sum."""
    return trace.head["shards"] > 2 and is_small(trace) and _is_large(_first_samples(trace), trace.head["shards"])


def _first_samples(trace: Trace) -> int:
    _, _, [first] = next(_cuts(trace), (0, "", [{}]))
    return sum(piece.samples for piece in first.values())


def explain_halves(one: Trace, halved: Trace) -> str | None:
    """The reason why a result of the script follows the cut of its mini-batches; None if no reason is found.

    See [Note: Halved shards].

    Args:
        one: the trace of a Loop, with values.
        halved: its trace with each shard cut into two or more; both have the same parameters.
    """
    floor = 0.1 * rounding_of(one)
    for step, turn, (shards, halves) in _cuts(one, halved):
        pairs = _pairs(shards, halves, one)
        reason = None
        if pairs:
            reason = _of_sum(pairs, floor) if shards[pairs[0].number].reduction == "sum" else _of_mean(pairs)
        reason = reason or _of_metrics(shards, halves)
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
    for step, turn, (shards, halves, samples) in _cuts(one, halved, singles):
        of_samples = {pair.number: pair for pair in _pairs(shards, samples, one)}
        pairs = [pair for pair in _pairs(shards, halves, one) if pair.number in of_samples]
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
    (_, here), (_, there) = (_folded(trace, step, "") for trace in (one, halved))
    if len(here) != len(there) or not float(here.norm()):
        return 0.0
    difference = float((here - there).norm() / here.norm())
    return difference if difference > _FITS else 0.0


def _cut_shards(shards: _Cut, pieces: _Cut) -> list[tuple[int, list[_Piece]]]:
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


def _starts(pieces: _Cut) -> dict[int, int]:
    """The number of samples before each piece of a mini-batch."""
    numbers = sorted(pieces)
    return dict(zip(numbers, accumulate((pieces[number].samples for number in numbers), initial=0), strict=False))


def _pairs(shards: _Cut, parts: _Cut, trace: Trace) -> list[_Pair]:
    """The shards of a trace whose loss and gradients are known, and their parts' too."""
    every = [*shards.values(), *parts.values()]
    samples = sum(shard.samples for shard in shards.values())
    all_weights = [sum(piece.weight for piece in cut.values()) for cut in (shards, parts)]
    pairs = []
    for number, pieces in _cut_shards(shards, parts):
        shard, *own = pieces
        reduction = shard.reduction
        losses = [piece.values.get((reduction or "", "loss")) for piece in pieces]
        if None in losses or not all(piece.weight > 0 for piece in pieces):
            continue
        # A mean was multiplied by its weight before backward, but for an only shard's.
        factors = [1.0 if reduction == "sum" else piece.weight / samples for piece in pieces]
        factors[0] = 1.0 if trace.head["shards"] == 1 else factors[0]
        gradients = _vectors(pieces, every) / _vector_of(factors).unsqueeze(1)
        if gradients.shape[1] < _ELEMENTS or not gradients.isfinite().all() or not gradients.norm(dim=1).all():
            continue
        by_samples = _vector_of([piece.samples / shard.samples for piece in own])
        counts = _vector_of([piece.weight / all_weights[1] for piece in own]) / (shard.weight / all_weights[0])
        pairs.append(_Pair(number, _vector_of(losses), gradients, by_samples, counts, shard.samples))
    return pairs


# -- reasons -----------------------------------------------------------------------------------------------


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
            return WEIGHS_PARTS.format(number=pair.number, weights=texts[0], shares=texts[1])
    return None


def _fitted(pairs: list[_Pair]) -> list[tuple[_Pair, torch.Tensor]]:
    """The shards with two halves, whose gradients differ, and the factors that fit them; empty if one has none."""
    fitted = []
    for pair in pairs:
        halves = pair.gradients[1:]
        unit = halves / halves.norm(dim=1, keepdim=True)
        if pair.samples >= _TWO_ROWS and len(halves) == 2 and abs(float(unit[0] @ unit[1])) <= 1 - _SAME:
            factors = _fit(halves, pair.gradients[0])
            if not pair.fits(factors) or not bool((factors > -_NEAR).all()):
                return []
            fitted.append((pair, factors))
    return fitted


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
    gradients = torch.stack([pair.gradients[1:].sum(0) - pair.gradients[0] for pair in pairs])
    losses = torch.stack([pair.losses[1:].sum() - pair.losses[0] for pair in pairs])
    own = torch.stack([pair.gradients[0] for pair in pairs])
    size = gradients.mean(0).norm()
    largest = max(float(pair.gradients.norm(dim=1).max()) for pair in pairs)
    rounding = max(floor, 1e-12) * max(float(pair.losses.abs().max()) for pair in pairs)
    are_same = _are_alike(gradients)
    differ = not _are_alike(own)
    have_same = _are_alike(losses.unsqueeze(1), rounding)
    return are_same and differ and have_same and float(size) > floor * largest


def _are_alike(rows: torch.Tensor, rounding: float = 0.0) -> bool:
    mean = rows.mean(0)
    return bool(((rows - mean).norm(dim=1) <= _SAME * mean.norm() + rounding).all())


def _have_ratio(pairs: list[_Pair], *, adds: bool) -> bool:
    """Whether losses and gradients of large shards are about the sum of their parts', or the mean."""
    large = [pair for pair in pairs if _is_large(pair.samples, len(pair.counts))]
    if sum(len(pair.counts) - 1 for pair in large) < 2:  # a single cut may have the ratio by chance
        return False
    expected = 1.0 if adds else 1 / len(large[0].counts)
    ratios = [float(pair.losses[0] / pair.losses[1:].sum()) / expected for pair in large]
    of_all = torch.stack([pair.gradients for pair in large]).sum(0)
    of_gradients = float(of_all[0].norm() / of_all[1:].sum(0).norm()) / expected
    return all(abs(ratio - 1) < _ABOUT[0] for ratio in ratios) and abs(of_gradients - 1) < _ABOUT[1]


def _of_metrics(shards: _Cut, halves: _Cut) -> str | None:
    """The first metric that is given as a mean and adds up in every shard, in two shards of more than zeros."""
    names = dict.fromkeys(name for shard in shards.values() for reduction, name in shard.values if reduction == "mean")
    cut = [pieces for _, pieces in _cut_shards(shards, halves) if len(pieces) == 3]
    for name in names:
        mean = ("mean", name)
        found = [[piece.values[mean] for piece in pieces if mean in piece.values] for pieces in cut]
        if name == "loss" or any(len(three) < 3 for three in found):
            continue
        adds = all(abs(whole - one - two) <= _EXACT * abs(whole) for whole, one, two in found)
        if adds and sum(all(three) for three in found) >= 2:
            return METRIC.format(name=name)
    return None
