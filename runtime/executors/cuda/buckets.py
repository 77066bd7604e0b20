"""Batch sizes for which decode steps are captured: a step runs in the smallest that holds it."""

from __future__ import annotations

from bisect import bisect_left


def batch_buckets(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, ... up to `most`, which is always the last."""
    sizes, power = [1, 2, 4, 8], 16
    while sizes[-1] < most:
        sizes += [power, power + power // 2]
        power *= 2
    return (*(size for size in sizes if size < most), most)


def bucket_of(batch: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest bucket for `batch` sequences; the largest holds any legal batch."""
    return buckets[bisect_left(buckets, batch)]
