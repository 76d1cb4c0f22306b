"""The counters behind ``GET /metrics``, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PREFIX = "mimo_vk_"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
RATES = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
# Names in Stats: (metric, labels, help)
ENGINE = {
    "expert_hits": ("expert_reads_total", '{place="ram"}', "experts asked for, by where they were"),
    "expert_misses": ("expert_reads_total", '{place="disk"}', ""),
    "tier_hits": ("expert_reads_total", '{place="device"}', ""),
    "bytes_read": ("disk_read_bytes_total", "", "bytes of experts read from disk"),
    "prefill_tokens": ("prefill_tokens_total", "", "prompt tokens computed"),
    "prefill_seconds": ("prefill_seconds_total", "", "time spent on prompts"),
    "pictures": ("pictures_total", "", "pictures that the tower was shown"),
    "picture_seconds": ("picture_seconds_total", "", "time spent on pictures"),
    "decode_tokens": ("decode_tokens_total", "", "answer tokens computed"),
    "decode_seconds": ("decode_seconds_total", "", "time spent on answers"),
}


class Histogram:
    """Counts by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}'
        yield f"{PREFIX}{name}_sum {self._sum:.6f}"
        yield f"{PREFIX}{name}_count {total}"


class Metrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self.rate = Histogram(RATES)

    def text(self, worker: Any) -> str:
        """Everything, with the worker's queue and the engine's counters."""
        lines: list[str] = []
        lines += _metric("requests_total", "counter", "requests that have ended, by route and outcome")
        for (route, outcome), count in sorted(self.requests.items()):
            lines.append(f'{PREFIX}requests_total{{route="{route}",outcome="{outcome}"}} {count}')
        for name, value, about in (
            ("prompt_tokens_total", self.prompt_tokens, "tokens of prompts read, those reused included"),
            ("reused_tokens_total", self.cached_tokens, "tokens of prompts that were there already"),
            ("generated_tokens_total", self.generated_tokens, "tokens generated"),
            ("worker_restarts_total", worker.restarts, "times the model's process was started again"),
        ):
            lines += [*_metric(name, "counter", about), f"{PREFIX}{name} {value}"]
        for name, value, about in (
            ("requests_queued", worker.queued, "requests that wait"),
            ("requests_running", int(worker.busy), "requests being worked on"),
            ("ready", int(worker.state == "ready"), "1 when the model is loaded"),
        ):
            lines += [*_metric(name, "gauge", about), f"{PREFIX}{name} {value}"]
        for name, histogram, about in (
            ("time_to_first_token_seconds", self.first_token, "from a request's arrival to its first token"),
            ("request_seconds", self.duration, "from a request's arrival to its end"),
            ("tokens_per_second", self.rate, "an answer's tokens by the time after the first"),
        ):
            lines += [*_metric(name, "histogram", about), *histogram.lines(name)]
        return "\n".join([*lines, *_engine_lines(worker.counters)]) + "\n"


def _engine_lines(counters: Mapping[str, float]) -> Iterator[str]:
    for key, (name, labels, about) in ENGINE.items():
        if about:
            yield from _metric(name, "counter", about)
        yield f"{PREFIX}{name}{labels} {counters.get(key, 0)}"


def _metric(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
