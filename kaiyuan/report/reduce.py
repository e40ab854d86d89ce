"""Curves of a page: few enough points to open at once, with every spike kept."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kaiyuan.report.run import Array

# Two points each, so that zooming in still shows more than a screen's pixels.
BUCKETS = 1500


def thin(x: Array, y: Array) -> tuple[list[Any], list[Any]]:
    """Return at most two points a bucket: where it is lowest and where it is highest.

    The buckets are parts of equal length along x.

    Args:
        x: whole numbers that grow, [points].
        y: their values; points that are not finite are left out.

    Returns:
        x and y of the points that are kept, which are points of the curve itself; the first and
        the last are always among them. Values are rounded to six digits.
    """
    there = np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) > 2 * BUCKETS:
        edges = np.linspace(x[0], x[-1] + 1, BUCKETS + 1)
        bounds = np.unique(np.searchsorted(x, edges))
        kept = {0, len(x) - 1}
        for begin, end in itertools.pairwise(bounds):
            kept.add(begin + int(y[begin:end].argmin()))
            kept.add(begin + int(y[begin:end].argmax()))
        chosen = np.array(sorted(kept))
        x, y = x[chosen], y[chosen]
    return x.tolist(), [float(f"{value:.6g}") for value in y]


def smooth(y: Array, parts: Sequence[slice], window: int) -> Array:
    """Return the mean of the last ``window`` finite values at each point.

    Args:
        y: values, [points].
        parts: the mean begins anew with each of these, because the data of a phase are others.
        window: number of points; at the beginning of a part there are fewer.
    """
    result = np.full(len(y), np.nan)
    for part in parts:
        there = np.isfinite(y[part])
        sums = np.concatenate(([0.0], np.cumsum(np.where(there, y[part], 0.0))))
        counts = np.concatenate(([0], np.cumsum(there)))
        ends = np.arange(1, len(there) + 1)
        begins = np.maximum(ends - window, 0)
        with np.errstate(invalid="ignore"):
            result[part] = (sums[ends] - sums[begins]) / (counts[ends] - counts[begins])
    return result


def smoothing_window(steps: int) -> int:
    """Return a half percent of the steps, at least five."""
    return max(5, steps // 200)


def knots(x: Array, y: Array) -> list[list[int]]:
    """Return the points between which a piecewise linear y runs straight."""
    slopes = np.diff(y) / np.maximum(np.diff(x), 1)
    bends = np.flatnonzero(np.diff(slopes)) + 1
    chosen = sorted({0, *bends.tolist(), len(x) - 1})
    return [[int(x[i]), int(y[i])] for i in chosen]
