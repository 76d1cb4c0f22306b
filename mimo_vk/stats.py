"""Where the time went: a backend that times itself, and the counters that `/stats`, `--json` and the bench print."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from mimo_vk.ops import Ops

PART_OF = {
    "linear": "dense",
    "swiglu": "dense",
    "attention": "attention",
    "expert_gate_up": "experts",
    "expert_down": "experts",
    "weighted_sum": "experts",
}
OTHER = ("embed", "rms_norm", "add", "split_qkv", "rope", "route")


@dataclass
class Stats:
    """Counters of one engine since it was opened. Seconds are wall time.

    ``parts`` lie inside prefill and decode, but for that of pictures.
    """

    load_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    reused_tokens: int = 0
    pictures: int = 0  # that the tower was shown; its seconds are outside prefill
    picture_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    expert_hits: int = 0
    expert_misses: int = 0
    bytes_read: int = 0
    device_layers: int | None = None  # dense layers on the device; None where none were, 0 once it is lost
    device_head: bool = False
    tier_slots: int | None = None  # experts that the device can hold; None without a device, 0 once it is lost
    tier_resident: int = 0
    tier_hits: int = 0  # experts that a forward pass used on the device
    tier_uploads: int = 0

    def add(self, part: str, seconds: float) -> None:
        """Count ``seconds`` under a part of a step."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, with tokens per second (null before there is one)."""
        out = asdict(self)
        out["prefill_tokens_per_second"] = rate(self.prefill_tokens, self.prefill_seconds)
        out["decode_tokens_per_second"] = rate(self.decode_tokens, self.decode_seconds)
        return out

    def lines(self) -> list[str]:
        """The same for a person, a few lines."""
        busy = self.prefill_seconds + self.decode_seconds + self.picture_seconds
        parts = ", ".join(
            f"{name} {seconds:.2f} s" for name, seconds in sorted(self.parts.items(), key=lambda p: -p[1])
        )
        pictures = [f"pictures: {self.pictures} in {self.picture_seconds:.2f} s"] if self.pictures else []
        dense = [] if self.device_layers is None else [self._dense_line()]
        tier = [] if self.tier_slots is None else [self._tier_line()]
        return [
            _phase("prompt", self.prefill_tokens, self.prefill_seconds) + f", {self.reused_tokens} tokens reused",
            _phase("answer", self.decode_tokens, self.decode_seconds),
            *pictures,
            self._experts_line(),
            *dense,
            *tier,
            f"time {busy:.2f} s: {parts}" if parts else f"time {busy:.2f} s",
        ]

    def _dense_line(self) -> str:
        if not self.device_layers and not self.device_head:
            return "device: lost, the dense layers run on the CPU"
        return f"device: holds {self.device_layers} dense layers" + (" and the head" if self.device_head else "")

    def _experts_line(self) -> str:
        """Where the experts were found that forward passes used."""
        places = {"in RAM": self.expert_hits, "on disk": self.expert_misses}
        if self.tier_slots is not None or self.tier_hits:
            places = {"on the device": self.tier_hits, **places}
        used = sum(places.values())
        shares = ", ".join(f"{count / used:.1%} {place}" for place, count in places.items()) if used else "none"
        return f"experts: {shares} of {used} used; read {self.bytes_read / 1e9:.2f} GB"

    def _tier_line(self) -> str:
        if self.tier_slots == 0:
            return "device: lost, the experts run on the CPU"
        return f"device: holds {self.tier_resident} of {self.tier_slots} experts, {self.tier_uploads} sent"


def rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second, or None before there is anything to divide."""
    return tokens / seconds if tokens and seconds > 0 else None


def _phase(name: str, tokens: int, seconds: float) -> str:
    per_second = rate(tokens, seconds)
    return f"{name}: {tokens} tokens in {seconds:.2f} s" + (f" ({per_second:.1f}/s)" if per_second else "")


class TimedOps:
    """A backend whose every operation adds its wall time to a part of ``stats``; the results are the backend's own."""

    def __init__(self, ops: Ops, stats: Stats) -> None:
        self.name = ops.name
        for operation in (*PART_OF, *OTHER):
            setattr(self, operation, _timed(getattr(ops, operation), PART_OF.get(operation, "other"), stats))


def _timed(function: Callable[..., Any], part: str, stats: Stats) -> Callable[..., Any]:
    clock = time.perf_counter

    def call(*args: Any) -> Any:
        began = clock()
        result = function(*args)
        stats.add(part, clock() - began)
        return result

    return call
