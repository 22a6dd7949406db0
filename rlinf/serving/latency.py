"""How long answers took: a histogram of fixed size, and its quantiles."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

QUANTILES = (0.5, 0.9, 0.99)
_SHORTEST, _RATIO = 1e-6, 1.05
_BUCKETS = math.ceil(math.log(1e9, _RATIO))


class Histogram:
    """Durations from a microsecond to a quarter of an hour, in buckets 5 % wide.

    A quantile is the middle of its bucket: it is off by at most 2.5 %.
    """

    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)
        self.count, self.sum = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = math.ceil(math.log(max(seconds, _SHORTEST) / _SHORTEST, _RATIO))
        self._counts[min(bucket, _BUCKETS)] += 1
        self.count += 1
        self.sum += seconds

    def quantile(self, share: float) -> float:
        """Seconds that this share of the durations do not exceed; NaN of none."""
        if not self.count:
            return math.nan
        bucket = bisect_left(list(accumulate(self._counts)), math.ceil(share * self.count))
        middle: float = _SHORTEST * _RATIO ** (bucket - 0.5)
        return middle


class Latencies:
    """What a server tells of itself."""

    PARTS = ("queue", "act", "total")

    def __init__(self) -> None:
        self.parts = {name: Histogram() for name in self.PARTS}
        self.counters = dict.fromkeys(("answered", "refused", "failed", "rows", "batches"), 0)

    def add(self, *, queue: float, act: float, total: float) -> None:
        """Count an answer: seconds that it waited, that its batch took, and in all."""
        for name, seconds in (("queue", queue), ("act", act), ("total", total)):
            self.parts[name].add(seconds)
        self.counters["answered"] += 1

    def exposition(self, **gauges: float) -> str:
        """The text that Prometheus reads."""
        lines = ["# TYPE rlinf_serving_seconds summary"]
        for name, part in self.parts.items():
            lines += [
                f'rlinf_serving_seconds{{part="{name}",quantile="{share}"}} '
                f"{part.quantile(share):.6g}"
                for share in QUANTILES
            ]
            lines.append(f'rlinf_serving_seconds_sum{{part="{name}"}} {part.sum:.6g}')
            lines.append(f'rlinf_serving_seconds_count{{part="{name}"}} {part.count}')
        for name, count in self.counters.items():
            lines.append(f"# TYPE rlinf_serving_{name}_total counter")
            lines.append(f"rlinf_serving_{name}_total {count}")
        for name, value in gauges.items():
            lines.append(f"# TYPE rlinf_serving_{name} gauge")
            lines.append(f"rlinf_serving_{name} {value:g}")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counters.items())
        if not self.counters["answered"]:
            return counts
        times = "; ".join(
            f"{name} " + " / ".join(f"{1e3 * part.quantile(share):.2f}" for share in QUANTILES)
            for name, part in self.parts.items()
        )
        return f"{counts}\nmilliseconds, p50 / p90 / p99: {times}"
