"""What a model costs before it is loaded: memory by part, disk, bytes read per token, and the cache that fits.

Everything comes from the Config and the headers; no weight is read. ``make_plan`` is the arithmetic, which the
engine also sizes its cache by; the rest prints it. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_vk.checkpoint import INDEX, SINGLE, Checkpoint
from mimo_vk.config import Config, load_config
from mimo_vk.errors import UsageError
from mimo_vk.memory import available_bytes
from mimo_vk.safetensors_header import tensor_bytes
from mimo_vk.tensor_names import dense_tensors, expert_bytes, qkv_rows
from mimo_vk.weights import check_names

if TYPE_CHECKING:
    from mimo_vk.settings import Settings

SHARE = 0.7  # of the available memory, where no --ram is given
GB = 1e9
PAGE = 4096
SLOT_SLACK = 2 * PAGE  # O_DIRECT reads whole pages around an expert's bytes
RUNTIME_BYTES = 250_000_000  # the interpreter with numpy, numba and its compiled kernels
TOKENIZER_BYTES_PER_ID = 700  # tokenizer.json's vocabulary and merges, as the tokenizers library holds them
TABLE_BYTES_PER_TENSOR = 900  # measured: the table of tensors with names and places
KERNEL_SCRATCH = 96_000_000  # decoded blocks, attention scores and the kernels' own buffers
REQUANTISED = ("qkv", "o_proj", "dense MLP", "head")  # what --dense-bits applies to
_MAPPED_KINDS = ("embedding", "head", "qkv", "o_proj", "dense MLP", "router", "norms")


@dataclass(frozen=True)
class Plan:
    """Bytes by part. ``cap`` is the number of experts cached per layer that is to be used."""

    dense: dict[str, int]  # by kind, as held in memory
    kv_full: int
    kv_rings: int
    scratch: int
    runtime: int
    layers_with_experts: int
    experts_per_layer: int
    experts_per_token: int
    expert_bytes: int
    slot_bytes: int
    ctx: int
    chunk: int
    dense_bits: int
    cap: int
    ram_bytes: int | None  # the limit the cap was chosen by; None: there was none

    @property
    def fixed_bytes(self) -> int:
        """All but the expert cache."""
        return sum(self.dense.values()) + self.kv_full + self.kv_rings + self.scratch + self.runtime

    @property
    def slot_bytes_all_layers(self) -> int:
        """One more expert cached in each layer."""
        return self.layers_with_experts * self.slot_bytes

    @property
    def cache_bytes(self) -> int:
        return self.cap * self.slot_bytes_all_layers

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + self.cache_bytes

    @property
    def least_bytes(self) -> int:
        """The least that can run: one routing step per layer."""
        return self.fixed_bytes + self.experts_per_token * self.slot_bytes_all_layers

    @property
    def cold_bytes_per_token(self) -> int:
        """Read from disk for a token of which nothing is cached."""
        return self.layers_with_experts * self.experts_per_token * self.expert_bytes

    @property
    def experts_bytes_on_disk(self) -> int:
        return self.layers_with_experts * self.experts_per_layer * self.expert_bytes


def slot_bytes_of(nbytes: int) -> int:
    """Memory of one cache slot."""
    return -(-nbytes // PAGE) * PAGE + SLOT_SLACK


def dense_bytes(config: Config, dense_bits: int = 0) -> dict[str, int]:
    """Dense weights by kind, as held: in the file's format, or requantised (int8 with a scale per row, float32)."""
    sizes = dict.fromkeys(_MAPPED_KINDS, 0)
    for wanted in dense_tensors(config).values():
        shape, count = wanted.shapes[0], 1
        for dim in shape:
            count *= dim
        if dense_bits and wanted.kind in REQUANTISED and wanted.dtype != "F32":
            sizes[wanted.kind] += count * 4 if dense_bits == 32 else count + 4 * shape[0]
        elif wanted.dtype == "BF16" and wanted.kind == "norms":
            sizes[wanted.kind] += 4 * count  # widened
        else:
            sizes[wanted.kind] += tensor_bytes(wanted.dtype, shape)
    return sizes


def disk_bytes(config: Config) -> int:
    """The text model's tensors as stored."""
    dense = sum(tensor_bytes(w.dtype, w.shapes[0]) for w in dense_tensors(config).values())
    return dense + sum(spec.moe for spec in config.layers) * config.n_routed_experts * expert_bytes(config)


def kv_bytes(config: Config, ctx: int) -> tuple[int, int]:
    """float32 keys and values at a context: (full layers' rows, window layers' rings)."""
    full = rings = 0
    for spec in config.layers:
        row = 4 * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        if spec.window is None:
            full += ctx * row
        else:
            rings += spec.window * row
    return full, rings


def scratch_bytes(config: Config, chunk: int) -> int:
    """Intermediate results of a block of ``chunk`` rows, the largest that live together, and two rows of logits."""
    hidden, chosen = config.hidden_size, config.num_experts_per_tok
    qkv = max(qkv_rows(spec) for spec in config.layers)
    heads = max(spec.num_heads * spec.v_head_dim for spec in config.layers)
    inner = max((config.intermediate_size for spec in config.layers if not spec.moe), default=0)
    attention = 2 * qkv + 2 * heads
    experts = chosen * (4 * config.moe_intermediate_size + 3 * hidden)
    floats = chunk * (8 * hidden + max(attention, 4 * inner, experts)) + 2 * config.vocab_size
    return 4 * floats + KERNEL_SCRATCH


def make_plan(
    config: Config,
    *,
    ctx: int,
    chunk: int,
    dense_bits: int = 0,
    ram_bytes: int | None = None,
    cap: int | None = None,
    num_tensors: int = 0,
) -> Plan:
    """The plan for a model: ``cap`` and ``ram_bytes`` both bound the cache (None: no bound).

    Never under one routing step per layer: a smaller ``cap`` is raised to it. Errors: UsageError where ``ram_bytes``
    holds less than that, saying what would do.
    """
    ctx = min(ctx, config.max_position_embeddings)
    nbytes, kv = expert_bytes(config), kv_bytes(config, ctx)
    layers, least = sum(spec.moe for spec in config.layers), config.num_experts_per_tok
    plan = Plan(
        dense=dense_bytes(config, dense_bits),
        kv_full=kv[0],
        kv_rings=kv[1],
        scratch=scratch_bytes(config, min(chunk, ctx)),
        runtime=RUNTIME_BYTES
        + TOKENIZER_BYTES_PER_ID * config.vocab_size
        + TABLE_BYTES_PER_TENSOR * (num_tensors or _count_tensors(config)),
        layers_with_experts=layers,
        experts_per_layer=config.n_routed_experts,
        experts_per_token=least,
        expert_bytes=nbytes,
        slot_bytes=slot_bytes_of(nbytes),
        ctx=ctx,
        chunk=min(chunk, ctx),
        dense_bits=dense_bits,
        cap=least,
        ram_bytes=ram_bytes,
    )
    if ram_bytes is not None and ram_bytes < plan.least_bytes:
        raise UsageError(
            f"{ram_bytes / GB:.2f} GB of memory (--ram, or {SHARE:.0%} of what is available) can't hold this model: "
            f"{plan.least_bytes / GB:.2f} GB needed for {plan.fixed_bytes / GB:.2f} GB beside the expert cache and "
            f"one routing step of {least} experts in each of {layers} layers"
        )
    return _with_cap(plan, config.n_routed_experts if cap is None else cap)


def _count_tensors(config: Config) -> int:
    return len(dense_tensors(config)) + 6 * config.n_routed_experts * sum(spec.moe for spec in config.layers)


def _with_cap(plan: Plan, wanted: int) -> Plan:
    cap = min(max(wanted, plan.experts_per_token), plan.experts_per_layer)
    if plan.ram_bytes is not None and plan.layers_with_experts:
        cap = min(cap, (plan.ram_bytes - plan.fixed_bytes) // plan.slot_bytes_all_layers)
    return replace(plan, cap=cap)


def plan_for(checkpoint: Checkpoint | None, config: Config, settings: Settings) -> Plan:
    """The plan by the settings: --ram, else (where no --cap is given either) 70% of the available memory."""
    ram = None if settings.ram is None else int(settings.ram * GB)
    if ram is None and settings.cap is None:
        available = available_bytes()
        ram = None if available is None else int(available * SHARE)
    return make_plan(
        config,
        ctx=settings.ctx,
        chunk=settings.chunk,
        dense_bits=settings.dense_bits,
        ram_bytes=ram,
        cap=settings.cap,
        num_tensors=len(checkpoint.tensors) if checkpoint else 0,
    )
