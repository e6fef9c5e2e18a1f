"""The exponential mean of a curve over steps, as the page and the pictures draw it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FORGOTTEN = 1e-100  # the share of a row in a mean that no digit shows, whatever its value


def smooth(values: npt.NDArray[np.float64], iterations: npt.NDArray[Any], steps: float) -> npt.NDArray[np.float64]:
    """Return the exponential mean over some `steps` without bias to 0, m_t / w_t, shape (n,).

        m_t = a^d m_(t-1) + x_t        w_t = a^d w_(t-1) + 1        a = 1 - 1 / steps

    where d is the number of steps between two rows, so that the mean does not depend on how often rows were written. A
    NaN adds nothing to either sum. Both are computed by doubling: after pass k each row has the sums over 2^k rows.

    Args:
        values: shape (n,); NaN and infinity are left out.
        iterations: of the values, rising, shape (n,).
        steps: whose share in the mean falls to 1/e, nearly; of 1 or less the values come back as they are.
    """
    if steps <= 1 or not len(values):
        return values
    finite = np.isfinite(values)
    mean = np.where(finite, values, 0.0)
    weight = finite.astype(np.float64)
    decay = np.zeros(len(values))  # over the rows that the sums of a row have already
    with np.errstate(under="ignore"):
        decay[1:] = (1.0 - 1.0 / steps) ** np.diff(iterations)
        reach = 1
        while reach < len(values) and decay.max() > _FORGOTTEN:
            mean[reach:] += decay[reach:] * mean[:-reach]
            weight[reach:] += decay[reach:] * weight[:-reach]
            decay[reach:] *= decay[:-reach].copy()
            reach *= 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return mean / weight
