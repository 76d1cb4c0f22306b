"""The stored formats as rounding in torch: what training rounds to is, bit for bit, what export stores."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK = 128
MX_BLOCK = 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_scale(weight: Tensor) -> Tensor:
    """The power of two of each 32 columns, so that their largest magnitude is at most 6 of it: [..., K/32]."""
    blocks = weight.unflatten(-1, (-1, MX_BLOCK))
    top = blocks.abs().amax(-1).clamp_min(2.0**-100)
    mantissa, exponent = torch.frexp(top / 6.0)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(top), exponent)


def mxfp4_round(weight: Tensor) -> Tensor:
    """The nearest MXFP4 numbers (ties to the even code), along the last axis in blocks of 32."""
    scale = mxfp4_scale(weight).unsqueeze(-1)
    value = weight.unflatten(-1, (-1, MX_BLOCK)) / scale
    magnitude = value.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return (torch.round(value / step) * step * scale).flatten(-2)


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes [..., K/2], the even column in the low nibble, and uint8 e8m0 scales [..., K/32]."""
    scale = mxfp4_scale(weight)
    value = mxfp4_round(weight).unflatten(-1, (-1, MX_BLOCK)) / scale.unsqueeze(-1)
    code = torch.searchsorted(E2M1, value.abs().contiguous()) | (torch.signbit(value) & (value != 0)).long() << 3
    code = code.flatten(-2)
    packed = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
    return packed, (torch.log2(scale) + 127).round().to(torch.uint8)


def fp8_codes(weight: Tensor, chunks: int = 1) -> tuple[Tensor, Tensor]:
    """e4m3fn numbers [N, K], float32 scales [chunks*ceil(N/chunks/128), ceil(K/128)]; each chunk has its own grid."""
    rows, columns = weight.shape
    per_chunk = rows // chunks
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = []
    for start in range(0, rows, per_chunk):
        for row in range(start, start + per_chunk, FP8_BLOCK):
            bottom = min(row + FP8_BLOCK, start + per_chunk)
            line = []
            for column in range(0, columns, FP8_BLOCK):
                block = weight[row:bottom, column : column + FP8_BLOCK]
                scale = block.abs().amax().clamp_min(1e-12) / 448.0
                line.append(scale)
                codes[row:bottom, column : column + FP8_BLOCK] = (
                    (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                )
            scales.append(torch.stack(line))
    return codes, torch.stack(scales)


def fp8_decode(codes: Tensor, scales: Tensor, chunks: int = 1) -> Tensor:
    """codes times the scale of their block, float32 [N, K]."""
    rows, columns = codes.shape
    per_chunk = rows // chunks
    scale_rows = -(-per_chunk // FP8_BLOCK)
    row = torch.arange(rows)
    row_scale = scales[row // per_chunk * scale_rows + row % per_chunk // FP8_BLOCK]
    return codes.float() * row_scale.repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def fp8_round(weight: Tensor, chunks: int = 1) -> Tensor:
    return fp8_decode(*fp8_codes(weight, chunks), chunks)


def bf16_round(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()
