"""What a model costs, by part, and the expert cache that fits: the arithmetic that sizes the engine's cache.

Everything comes from the Config; no weight is read. GB = 1e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mimo_vk.config import Config
from mimo_vk.direct_io import span_capacity
from mimo_vk.errors import CheckpointError, UsageError
from mimo_vk.image import load_limits
from mimo_vk.machine import memory_available
from mimo_vk.safetensors_header import tensor_bytes
from mimo_vk.settings import PIN_SLOTS
from mimo_vk.tensor_names import TOWER_KIND, dense_tensors, expert_bytes, qkv_rows
from mimo_vk.vision import ROWS

if TYPE_CHECKING:
    from mimo_vk.checkpoint import Checkpoint
    from mimo_vk.settings import Settings

SHARE = 0.7  # of the available memory, where no --ram is given
GB = 1e9
RUNTIME_BYTES = 250_000_000  # the interpreter with numpy, numba and its compiled kernels
TOKENIZER_BYTES_PER_ID = 700  # tokenizer.json's vocabulary and merges, as the tokenizers library holds them
TABLE_BYTES_PER_TENSOR = 900  # measured: the table of tensors with names and places
SERVER_BYTES = 110_000_000  # measured 86 MB: the process that speaks HTTP, and a helper of Python's beside it
BYTES_PER_KEPT_ID = 40  # an int and its place in a list
PICTURE_ROWS_KEPT = 64 << 20  # of pictures seen before: one that stays in a conversation is looked at once
KERNEL_SCRATCH = 96_000_000  # decoded blocks, attention scores and the kernels' own buffers
REQUANTISED = ("qkv", "o_proj", "dense MLP", "head")  # what --dense-bits applies to
KINDS = ("embedding", "head", "qkv", "o_proj", "dense MLP", "router", "norms", TOWER_KIND)


@dataclass(frozen=True)
class Plan:
    """Bytes by part. ``cap`` is the number of experts cached per layer that is to be used."""

    dense: dict[str, int]  # by kind, as held in memory
    kv_full: int
    kv_rings: int
    scratch: int
    runtime: int
    snapshots: int  # all that are kept, and the one that a closed question is read from
    pictures: int  # the largest picture's way through the tower, and the rows of pictures
    server: int  # the process that speaks HTTP, with a tokenizer of its own
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
    serving: bool = False  # whether ``server`` is part of the whole
    tier: int = 0  # of this machine's memory: the device process, and its experts where the device shares the memory

    @property
    def fixed_bytes(self) -> int:
        """All but the expert cache."""
        kept = self.kv_full + self.kv_rings + self.snapshots
        processes = self.runtime + self.tier + (self.server if self.serving else 0)
        return sum(self.dense.values()) + kept + self.scratch + self.pictures + processes

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


def dense_bytes(config: Config, dense_bits: int = 0) -> dict[str, int]:
    """Dense weights by kind, as held: in the file's format, or requantised (int8 with a scale per row, float32)."""
    sizes = dict.fromkeys(KINDS, 0)
    for wanted in dense_tensors(config).values():
        shape = wanted.shapes[0]
        count = prod(shape)
        if dense_bits and wanted.kind in REQUANTISED and wanted.dtype != "F32":
            sizes[wanted.kind] += count * 4 if dense_bits == 32 else count + 4 * shape[0]
        elif wanted.dtype == "BF16" and len(shape) == 1:
            sizes[wanted.kind] += 4 * count  # widened
        else:
            sizes[wanted.kind] += tensor_bytes(wanted.dtype, shape)
    return sizes


def disk_bytes(config: Config) -> int:
    """The text model's tensors as stored."""
    dense = sum(tensor_bytes(w.dtype, w.shapes[0]) for w in dense_tensors(config).values() if w.kind != TOWER_KIND)
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


def snapshot_bytes(config: Config, ctx: int) -> int:
    """One snapshot of a full context: a copy of the rings, a row of logits, the ids."""
    return kv_bytes(config, ctx)[1] + 4 * config.vocab_size + BYTES_PER_KEPT_ID * ctx


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


def picture_bytes(config: Config, ctx: int, tokens: int) -> int:
    """What it takes to see a picture of ``tokens``: its numbers and the tower's for each patch, rows for a prompt.

    Decoding comes before the tower's numbers and needs less, but for a file of several times the pixels that are kept.
    """
    tower = config.tower
    if tower is None:
        return 0
    patch = tower.patch_values + tower.hidden_size + max(tower.hidden_size, tower.qkv_rows) + 2 * tower.head_dim
    piece = 2 * tower.qkv_rows + 3 * tower.intermediate_size + 4 * tower.hidden_size
    floats = tokens * tower.merge_unit * patch + ROWS * piece + ctx * config.hidden_size
    return 4 * floats + PICTURE_ROWS_KEPT


def least_plan(
    config: Config,
    *,
    ctx: int,
    chunk: int,
    dense_bits: int = 0,
    num_tensors: int = 0,
    pin_slots: int = PIN_SLOTS,
    picture_tokens: int | None = None,
    serving: bool = False,
) -> Plan:
    """The plan with the smallest cache that can run: one routing step per layer.

    picture_tokens: of the largest picture (None: the whole context).
    """
    ctx = min(ctx, config.max_position_embeddings)
    chunk = min(chunk, ctx)
    nbytes, kv = expert_bytes(config), kv_bytes(config, ctx)
    tables = TABLE_BYTES_PER_TENSOR * (num_tensors or _count_tensors(config))
    tokenizer = TOKENIZER_BYTES_PER_ID * config.vocab_size
    return Plan(
        dense=dense_bytes(config, dense_bits),
        kv_full=kv[0],
        kv_rings=kv[1],
        scratch=scratch_bytes(config, chunk),
        runtime=RUNTIME_BYTES + tokenizer + tables,
        snapshots=(pin_slots + 1) * snapshot_bytes(config, ctx),
        pictures=picture_bytes(config, ctx, ctx if picture_tokens is None else min(ctx, picture_tokens)),
        server=SERVER_BYTES + tokenizer,
        layers_with_experts=sum(spec.moe for spec in config.layers),
        experts_per_layer=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_bytes=nbytes,
        slot_bytes=span_capacity(nbytes),
        ctx=ctx,
        chunk=chunk,
        dense_bits=dense_bits,
        cap=config.num_experts_per_tok,
        ram_bytes=None,
        serving=serving,
    )


def _count_tensors(config: Config) -> int:
    return len(dense_tensors(config)) + 6 * config.n_routed_experts * sum(spec.moe for spec in config.layers)


def fit(plan: Plan, ram_bytes: int | None = None, cap: int | None = None, source: str = "--ram") -> Plan:
    """The largest cache within ``cap`` experts per layer and ``ram_bytes`` (None: no bound).

    A ``cap`` under one routing step is raised to it. ``source`` says where the limit comes from.
    Errors: UsageError where the memory holds less than one routing step per layer, saying what would do.
    """
    if ram_bytes is not None and ram_bytes < plan.least_bytes:
        raise UsageError(
            f"this model needs {plan.least_bytes / GB:.2f} GB of memory, and {source} allows {ram_bytes / GB:.2f} GB: "
            f"{plan.fixed_bytes / GB:.2f} GB beside the expert cache, and one routing step "
            f"({plan.experts_per_token} experts in each of {plan.layers_with_experts} layers)"
        )
    best = plan.experts_per_layer if cap is None else min(max(cap, plan.experts_per_token), plan.experts_per_layer)
    if ram_bytes is not None and plan.layers_with_experts:
        best = min(best, (ram_bytes - plan.fixed_bytes) // plan.slot_bytes_all_layers)
    return replace(plan, cap=best, ram_bytes=ram_bytes)


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
    """``least_plan`` and ``fit`` in one."""
    least = least_plan(config, ctx=ctx, chunk=chunk, dense_bits=dense_bits, num_tensors=num_tensors)
    return fit(least, ram_bytes, cap)


def memory_limit(settings: Settings) -> tuple[int | None, str]:
    """What bounds the cache, in bytes, and its name: --ram, else (with no --cap either) 70% of what is available."""
    if settings.ram is not None:
        return int(settings.ram * GB), "--ram"
    share = 0 if settings.cap is not None else int(memory_available() * SHARE)
    return share or None, f"{SHARE:.0%} of the available memory (--ram or --cap to go beyond)"


def settings_plan(config: Config, settings: Settings, num_tensors: int = 0, picture_tokens: int | None = None) -> Plan:
    """The smallest plan with the settings' context, block, dense bits and snapshots."""
    return least_plan(
        config,
        ctx=settings.ctx,
        chunk=settings.chunk,
        dense_bits=settings.dense_bits,
        num_tensors=num_tensors,
        pin_slots=settings.pin_slots,
        picture_tokens=picture_tokens,
        serving=settings.serving,
    )


def largest_picture(model_dir: Path, config: Config, settings: Settings) -> int | None:
    """Tokens of the largest picture that the checkpoint's limits and the settings allow; None where nothing says."""
    if config.vision is None:
        return None
    try:
        limits = load_limits(model_dir, config.vision, settings)
    except CheckpointError:  # said where a picture is asked for
        return settings.max_image_tokens
    most = max(1, limits.max_pixels // limits.unit**2)
    return most if limits.max_tokens is None else min(most, limits.max_tokens)


def plan_for(checkpoint: Checkpoint, config: Config, settings: Settings, tier: int = 0) -> Plan:
    """The plan by the settings, with ``tier`` bytes taken for the device. Errors: UsageError if it doesn't fit."""
    limit, source = memory_limit(settings)
    pictures = largest_picture(checkpoint.model_dir, config, settings)
    least = replace(settings_plan(config, settings, len(checkpoint.tensors), pictures), tier=tier)
    return fit(least, limit, settings.cap, source)
