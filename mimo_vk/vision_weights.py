"""The picture tower's weights as a tree. Matrices stay in the file's BF16 whatever --dense-bits says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mimo_vk.formats import F32, MatrixBF16
from mimo_vk.tensor_names import TOWER
from mimo_vk.vision_config import VisionConfig


@dataclass(frozen=True, eq=False)
class BiasedMatrix:
    matrix: MatrixBF16  # [N, K]
    bias: F32  # [N]


@dataclass(frozen=True, eq=False)
class VisionBlock:
    """``kind`` is FULL, ROWS or COLUMNS of ``vision_config``."""

    kind: int
    norm1: F32  # [H]
    qkv: BiasedMatrix  # Q, K and V rows, whole
    sinks: F32 | None  # [heads]
    proj: BiasedMatrix
    norm2: F32  # [H]
    gate: BiasedMatrix
    up: BiasedMatrix
    down: BiasedMatrix


@dataclass(frozen=True, eq=False)
class VisionWeights:
    config: VisionConfig
    patch_embed: MatrixBF16  # [H, numbers in a patch]
    blocks: tuple[VisionBlock, ...]
    merger_norm: F32  # [H]
    merger_up: MatrixBF16  # [unit*H, unit*H]
    merger_down: MatrixBF16  # [text H, unit*H]


def build_tower(
    config: VisionConfig, vector: Callable[[str], F32], matrix: Callable[[str], MatrixBF16]
) -> VisionWeights:
    """The tree; ``vector`` and ``matrix`` read a tensor, whose name and shape were checked before."""

    def biased(name: str) -> BiasedMatrix:
        return BiasedMatrix(matrix(name + ".weight"), vector(name + ".bias"))

    def block(index: int) -> VisionBlock:
        at = f"{TOWER}blocks.{index}."
        return VisionBlock(
            kind=config.block_types[index],
            norm1=vector(at + "norm1.weight"),
            qkv=biased(at + "attn.qkv"),
            sinks=vector(at + "attn.sinks") if config.sinks_in(index) else None,
            proj=biased(at + "attn.proj"),
            norm2=vector(at + "norm2.weight"),
            gate=biased(at + "mlp.gate_proj"),
            up=biased(at + "mlp.up_proj"),
            down=biased(at + "mlp.down_proj"),
        )

    return VisionWeights(
        config=config,
        patch_embed=matrix(TOWER + "patch_embed.proj.weight"),
        blocks=tuple(block(index) for index in range(len(config.block_types))),
        merger_norm=vector(TOWER + "merger.ln_q.weight"),
        merger_up=matrix(TOWER + "merger.mlp.0.weight"),
        merger_down=matrix(TOWER + "merger.mlp.2.weight"),
    )
