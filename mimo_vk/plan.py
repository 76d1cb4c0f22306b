"""``mimo-vk plan``: the resource plan, from config.json and the shards' headers, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_vk.budget import (
    GB,
    KINDS,
    Plan,
    disk_bytes,
    fit,
    largest_picture,
    make_plan,
    memory_limit,
    plan_for,
    settings_plan,
)
from mimo_vk.checkpoint import INDEX, SINGLE, Checkpoint
from mimo_vk.config import Config, load_config
from mimo_vk.errors import UsageError
from mimo_vk.vulkan.setup import DevicePlan, plan_device
from mimo_vk.weights import check_names

if TYPE_CHECKING:
    from mimo_vk.settings import Settings

__all__ = ["Plan", "main", "make_plan", "plan_for"]


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Print the plan (``--json``: as one object). A checkpoint that isn't downloaded yet is planned from its config.

    Errors: CheckpointError; UsageError where --ram can't hold the model, after the parts were printed.
    """
    directory = settings.model or _shipped()
    config, warnings = load_config(directory / "config.json")
    checkpoint = _open(directory, settings)
    if checkpoint is not None:
        check_names(checkpoint, config)
    limit, source = memory_limit(settings)
    tensors = len(checkpoint.tensors) if checkpoint else 0
    plan, misfit = settings_plan(config, settings, tensors, largest_picture(directory, config, settings)), None
    device, about_device = plan_device(settings, config, plan.ctx, plan.chunk)
    plan = replace(plan, tier=device.ram_bytes if device else 0)
    try:
        plan = fit(plan, limit, settings.cap, source)
    except UsageError as error:
        misfit = error
    facts = _facts(directory, config, checkpoint, plan, None if misfit is None else str(misfit), limit)
    facts |= _device_facts(device, about_device)
    if getattr(args, "json", False):
        print(json.dumps({**facts, "warnings": warnings}))
    else:
        print("\n".join([*_report(facts, config, plan, source), *(f"warning: {line}" for line in warnings)]))
    if misfit is not None and settings.ram is not None:
        raise misfit
    return 0


def _shipped() -> Path:
    from mimo_vk.engine import shipped_model  # the engine imports this module

    return shipped_model()


def _open(directory: Path, settings: Settings) -> Checkpoint | None:
    """The checkpoint's headers; None where there is only a config.json so far."""
    if not (directory / INDEX).exists() and not (directory / SINGLE).exists():
        return None
    return Checkpoint.open(directory, settings.dirs)


def _facts(
    directory: Path, config: Config, checkpoint: Checkpoint | None, plan: Plan, misfit: str | None, limit: int | None
) -> dict[str, Any]:
    """The plan's numbers, in bytes; ``cap`` is null where not even one routing step fits."""
    files = [path.stat().st_size for path in checkpoint.files] if checkpoint else []
    return {
        "model": str(directory),
        **asdict(plan),
        "cap": None if misfit else plan.cap,
        "ram_bytes": limit,
        "fixed_bytes": plan.fixed_bytes,
        "slot_bytes_all_layers": plan.slot_bytes_all_layers,
        "cache_bytes": None if misfit else plan.cache_bytes,
        "peak_bytes": None if misfit else plan.peak_bytes,
        "least_bytes": plan.least_bytes,
        "cold_bytes_per_token": plan.cold_bytes_per_token,
        "disk_text_bytes": disk_bytes(config),
        "disk_experts_bytes": plan.experts_bytes_on_disk,
        "disk_files": len(files),
        "disk_files_bytes": sum(files),
        "misfit": misfit,
    }


def _device_facts(device: DevicePlan | None, about: str) -> dict[str, Any]:
    """What the device holds; ``device`` is the line about it, null where none is used and nothing is to be said."""
    return {
        "device": about or None,
        "tier_slots": device.slots if device else 0,
        "tier_bytes": device.nbytes if device else 0,
        "device_layers": len(device.dense.layers) if device and device.dense else 0,
        "device_head": bool(device and device.dense and device.dense.head),
        "device_dense_bytes": device.dense_bytes if device else 0,
    }


def _report(facts: dict[str, Any], config: Config, plan: Plan, source: str) -> list[str]:
    full = sum(spec.window is None for spec in config.layers)
    window = next((spec.window for spec in config.layers if spec.window is not None), 0)
    head = (
        f"{facts['model']}: {config.num_hidden_layers} layers ({full} full, {config.num_hidden_layers - full} with a "
        f"window of {window}), {plan.experts_per_layer} experts in {plan.layers_with_experts} of them, "
        f"{plan.experts_per_token} a token; ctx {plan.ctx}, chunk {plan.chunk}, dense-bits {plan.dense_bits}"
    )
    return [head, "", *_columns(_memory_rows(plan, config, full, window) + _cache_rows(facts, plan, source)), "",
            *_columns(_disk_rows(facts, plan) + _device_rows(facts, plan))]  # fmt: skip


Row = tuple[str, int | None, str]
PICTURES = "seeing one of the largest size; MIMO_MAX_IMAGE_TOKENS makes it smaller"


def _memory_rows(plan: Plan, config: Config, full: int, window: int) -> list[Row]:
    rings = config.num_hidden_layers - full
    rows: list[Row] = [("memory", None, "GB"), ("  dense weights", sum(plan.dense.values()), "")]
    rows += [(f"    {kind}", plan.dense[kind], "") for kind in KINDS if plan.dense[kind]]
    rows += [
        ("  KV cache", plan.kv_full + plan.kv_rings, ""),
        (f"    {full} full layers", plan.kv_full, f"{plan.ctx} rows each"),
        (f"    {rings} window layers", plan.kv_rings, f"{window} rows each"),
        ("  snapshots", plan.snapshots, "of chats and closed questions; MIMO_PIN_SLOTS keeps fewer"),
        ("  scratch", plan.scratch, f"a block of {plan.chunk} tokens"),
        *([("  pictures", plan.pictures, PICTURES)] if plan.pictures else []),
        ("  runtime", plan.runtime, "interpreter, compiled kernels, tokenizer, tables"),
    ]
    if plan.tier:
        rows.append(("  for the device", plan.tier, "its process, and what it holds where it shares this memory"))
    return [*rows, ("  all but the expert cache", plan.fixed_bytes, "")]


def _cache_rows(facts: dict[str, Any], plan: Plan, source: str) -> list[Row]:
    limit = facts["ram_bytes"]
    within = f"{limit / GB:.3f} GB, {source}" if limit is not None else ""
    layers = plan.layers_with_experts
    rows: list[Row] = [
        ("  one cached expert per layer", plan.slot_bytes_all_layers, f"{layers} slots of {plan.slot_bytes} bytes"),
    ]
    if facts["misfit"]:
        rows.append(
            ("  least that can run", plan.least_bytes, f"--cap {plan.experts_per_token}; more than the {within}")
        )
        return rows
    return [
        *rows,
        (f"  expert cache, cap {plan.cap}", plan.cache_bytes, f"of {plan.experts_per_layer} experts per layer"),
        ("  peak", plan.peak_bytes, f"of {within}" if within else "no limit given"),
        ("  least that can run", plan.least_bytes, f"--cap {plan.experts_per_token}"),
        ("  with serve, on top of it all", plan.server, "the process that speaks HTTP; serve sizes its cache with it"),
    ]


def _disk_rows(facts: dict[str, Any], plan: Plan) -> list[Row]:
    files = facts["disk_files"]
    found = (f"  {files} files found", facts["disk_files_bytes"], "") if files else ("  no shards found yet", 0, "")
    step = f"{plan.layers_with_experts} layers x {plan.experts_per_token} experts x {plan.expert_bytes} bytes"
    return [
        ("disk", None, "GB"),
        ("  text model", facts["disk_text_bytes"], ""),
        ("    experts", plan.experts_bytes_on_disk, ""),
        found,
        ("  read per token, cold", plan.cold_bytes_per_token, step),
    ]


def _device_rows(facts: dict[str, Any], plan: Plan) -> list[Row]:
    """What lives on a device, or why nothing does."""
    if not facts["device"]:
        return []
    rows: list[Row] = [("device", None, "GB")]
    if facts["device_dense_bytes"]:
        head = " and the head" if facts["device_head"] else ""
        rows.append(
            (f"  {facts['device_layers']} dense layers{head}", facts["device_dense_bytes"], "with their KV rows")
        )
    every = plan.layers_with_experts * plan.experts_per_layer
    rows.append((f"  room for {facts['tier_slots']} experts", facts["tier_bytes"], f"of {every}; {facts['device']}"))
    return rows


def _columns(rows: list[Row]) -> list[str]:
    """Names to the left, GB to the right, remarks after them."""
    lines = []
    for name, nbytes, remark in rows:
        if nbytes is None:
            lines.append(f"{name:<32}{remark:>10}")
        else:
            lines.append(f"{name:<32}{nbytes / GB:>10.3f}  {remark}".rstrip())
    return lines
