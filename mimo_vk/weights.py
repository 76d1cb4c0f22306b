"""Names become the tree of weights. Every tensor is used once, or stands in the list of what was skipped.

Dense weights are views of the mapped files, in the file's own format; the fused qkv stays in the file's row order,
which ``Ops.split_qkv`` undoes on the outputs. Experts are not read here: the table says where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_vk.checkpoint import Checkpoint, TensorInfo
from mimo_vk.config import Config, LayerSpec
from mimo_vk.errors import CheckpointError
from mimo_vk.expert_table import ExpertLocation, ExpertTable, build_expert_table
from mimo_vk.formats import (
    F32,
    DenseMatrix,
    MatrixBF16,
    MatrixF32,
    MatrixFP8,
    MatrixInt8,
    bf16_to_float32,
    dequantize,
    quantize_int8,
)
from mimo_vk.ops import QkvLayout
from mimo_vk.safetensors_header import capped, quoted
from mimo_vk.tensor_names import SKIPPED, TOWER, Shape, dense_tensors, layer_prefix, qkv_scale_row
from mimo_vk.vision_weights import VisionWeights, build_tower
from mimo_vk.weight_check import Checked, Progress, check_tensors, first_bad

__all__ = [
    "AttentionWeights", "DenseMlp", "ExpertLocation", "ExpertTable", "LayerWeights", "Router", "Weights",
    "check_names", "load_weights",
]  # fmt: skip

_BLOCK = 2 << 20  # bytes of float32 that requantising makes at a time: what a core's cache holds
DENSE_BITS = (0, 8, 32)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    qkv_proj: DenseMatrix  # [chunks * (Q + K + V rows of a chunk), H], rows as stored
    layout: QkvLayout
    o_proj: DenseMatrix  # [H, heads*v_head_dim]
    sink: F32 | None  # [heads]


@dataclass(frozen=True, eq=False)
class DenseMlp:
    gate: DenseMatrix  # [I, H]
    up: DenseMatrix  # [I, H]
    down: DenseMatrix  # [H, I]


@dataclass(frozen=True, eq=False)
class Router:
    gate: MatrixBF16  # [experts, H]; never requantised
    bias: F32  # [experts], takes part in the choice only


@dataclass(frozen=True, eq=False)
class LayerWeights:
    spec: LayerSpec
    input_norm: F32  # [H]
    attention: AttentionWeights
    post_attention_norm: F32  # [H]
    mlp: DenseMlp | None
    router: Router | None


@dataclass(frozen=True, eq=False)
class Weights:
    config: Config
    embed: MatrixBF16  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    norm: F32  # [H]
    lm_head: DenseMatrix  # [vocab, H]
    experts: ExpertTable
    vision: VisionWeights | None
    skipped: list[str]  # tensors that aren't used


class _Names:
    """Holds the checkpoint's tensors against what the Config needs, from the headers alone."""

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.consumed: set[str] = set()

    def check(self) -> tuple[ExpertTable, list[str]]:
        tensors = self.checkpoint.tensors
        for name, wanted in dense_tensors(self.config).items():
            self.consumed.add(name)
            info = tensors.get(name)
            if info is None:
                self.note_missing(name)
            elif info.dtype != wanted.dtype or info.shape not in wanted.shapes:
                self.note_wrong(info, (wanted.dtype,), wanted.shapes)
        table = build_expert_table(self.config, tensors, self.consumed, self.note_missing, self.note_wrong)
        unknown = []
        skipped = list(self.checkpoint.absent.keys() - self.consumed)
        for name, info in tensors.items():
            if name in self.consumed:
                continue
            ours = self.config.tower is not None and name.startswith(TOWER)
            if name in self.checkpoint.optional or (SKIPPED.match(name) and not ours):
                skipped.append(name)
            else:
                unknown.append(f"{_at(info)}: unknown: the model that config.json describes has no such tensor")
        faults = capped(self.missing) + capped(self.wrong) + capped(unknown)
        if faults:
            raise CheckpointError(faults)
        return table, sorted(skipped)

    def note_missing(self, name: str) -> None:
        shard = self.checkpoint.absent.get(name)
        where = f": the index puts it in {shard}, which can't be used" if shard else ""
        self.missing.append(f"{self.checkpoint.model_dir}: tensor {name}: missing{where}")

    def note_wrong(self, info: TensorInfo, dtypes: Sequence[str], shapes: Sequence[Shape]) -> None:
        expected = f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in shapes)}"
        self.wrong.append(f"{_at(info)}: expected {expected}, found {info.dtype} {list(info.shape)}")


def _at(info: TensorInfo) -> str:
    return f"{info.path}: tensor {quoted(info.name)}"


def check_names(checkpoint: Checkpoint, config: Config) -> tuple[ExpertTable, list[str]]:
    """The expert table and the skipped tensors; reads nothing but the headers.

    Errors: CheckpointError with a line per missing, unknown or ill-shaped tensor (the first 20 of each, and a count).
    """
    return _Names(checkpoint, config).check()


def load_weights(
    checkpoint: Checkpoint, config: Config, dense_bits: int = 0, progress: Progress | None = None, threads: int = 2
) -> Weights:
    """The weights of a checkpoint, all dense ones but the embedding looked through for NaN and infinities.

    ``dense_bits`` 8 or 32 turns qkv, o_proj, dense MLP and head into int8 or float32. ``progress`` is told what is
    done, how many bytes of it, and of how many. Errors: CheckpointError, ReadError.
    """
    assert dense_bits in DENSE_BITS, dense_bits
    table, skipped = check_names(checkpoint, config)
    return _Loader(checkpoint, config, dense_bits, progress, threads).load(table, skipped)


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: Config, dense_bits: int, progress: Progress | None, threads: int
    ) -> None:
        self.checkpoint, self.config, self.dense_bits = checkpoint, config, dense_bits
        self.progress, self.threads = progress, threads
        self.unchecked: list[Checked] = []
        self.faults: list[str] = []
        kinds = ("head", "qkv", "o_proj", "dense MLP")
        names = [n for n, wanted in dense_tensors(config).items() if wanted.kind in kinds and wanted.dtype != "F32"]
        self.done, self.total = 0, sum(checkpoint.tensors[name].nbytes for name in names)

    def load(self, table: ExpertTable, skipped: list[str]) -> Weights:
        embed = MatrixBF16(self.checkpoint.mapped("model.embed_tokens.weight"))  # rows are read when they're needed
        layers = tuple(self._layer(spec) for spec in self.config.layers)
        norm, head = self._vector("model.norm.weight"), self._bf16("lm_head.weight")
        tower = self.config.tower
        vision = None if tower is None else build_tower(tower, self._vector, lambda name: MatrixBF16(self._flat(name)))
        self.faults += check_tensors(self.unchecked, self.threads, self.progress)
        if self.faults:
            raise CheckpointError(capped(self.faults))
        return Weights(self.config, embed, layers, norm, head, table, vision, skipped)

    def _layer(self, spec: LayerSpec) -> LayerWeights:
        at = layer_prefix(spec.index)
        mlp = router = None
        if spec.moe:
            gate = MatrixBF16(self._view(at + "mlp.gate.weight"))
            router = Router(gate, self._vector(at + "mlp.gate.e_score_correction_bias"))
        else:
            gate_proj, up, down = (self._fp8(f"{at}mlp.{name}_proj", 1) for name in ("gate", "up", "down"))
            mlp = DenseMlp(gate_proj, up, down)
        return LayerWeights(
            spec=spec,
            input_norm=self._vector(at + "input_layernorm.weight"),
            attention=self._attention(spec, at + "self_attn."),
            post_attention_norm=self._vector(at + "post_attention_layernorm.weight"),
            mlp=mlp,
            router=router,
        )

    def _attention(self, spec: LayerSpec, at: str) -> AttentionWeights:
        chunks = self.config.qkv_chunks
        return AttentionWeights(
            qkv_proj=self._fp8(at + "qkv_proj", chunks),
            layout=QkvLayout(chunks, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim),
            o_proj=self._bf16(at + "o_proj.weight"),
            sink=self._vector(at + "attention_sink_bias") if spec.has_sink else None,
        )

    def _view(self, name: str) -> NDArray[Any]:
        """The mapped tensor, noted for the check."""
        array = self.checkpoint.mapped(name)
        ranges = self.checkpoint.data_ranges(name)
        self.unchecked.append(Checked(_at(self.checkpoint.tensors[name]), array, ranges))
        return array

    def _flat(self, name: str) -> NDArray[Any]:
        """The mapped tensor as a matrix: a convolution's kernels are rows."""
        array = self._view(name)
        return array.reshape(len(array), -1)

    def _vector(self, name: str) -> F32:
        """A small tensor as a float32 of our own."""
        array = self._view(name)
        return bf16_to_float32(array) if array.dtype == np.uint16 else array.astype(np.float32)

    def _bf16(self, name: str) -> DenseMatrix:
        if not self.dense_bits:
            return MatrixBF16(self._view(name))
        return self._requantised(name, lambda start, stop: MatrixBF16(self.checkpoint.read_rows(name, start, stop)))

    def _fp8(self, name: str, chunks: int) -> DenseMatrix:
        """FP8 codes with their grid of scales, which restarts at each of ``chunks`` runs of rows."""
        codes, scales = name + ".weight", self._vector(name + ".weight_scale_inv")
        scale_row = qkv_scale_row(self.checkpoint.tensors[codes].shape[0], scales.shape[0], chunks)
        if not self.dense_bits:
            return MatrixFP8(self._view(codes), scales, scale_row)
        return self._requantised(
            codes,
            lambda start, stop: MatrixFP8(self.checkpoint.read_rows(codes, start, stop), scales, scale_row[start:stop]),
        )

    def _requantised(self, name: str, stored: Callable[[int, int], DenseMatrix]) -> DenseMatrix:
        """int8 or float32 made block by block; ``stored`` reads rows start..stop-1 (into memory of their own)."""
        info = self.checkpoint.tensors[name]
        rows, columns = info.shape
        values: NDArray[Any] = np.empty((rows, columns), np.float32 if self.dense_bits == 32 else np.int8)
        scales = np.empty(rows, np.float32)
        step = max(1, _BLOCK // (4 * columns))

        def convert(start: int) -> str | None:
            stop = min(start + step, rows)
            block = dequantize(stored(start, stop))
            bad = first_bad(block.reshape(-1))
            if bad is not None:
                row, column = divmod(bad, columns)
                at = f"row {start + row}, column {column}"
                return f"{_at(info)}: {at}: expected a finite number, found {block[row, column]}"
            if self.dense_bits == 32:
                values[start:stop] = block
            else:
                quantized = quantize_int8(block)
                values[start:stop], scales[start:stop] = quantized.codes, quantized.scales
            return None

        with ThreadPoolExecutor(self.threads) as pool:
            for start, fault in zip(range(0, rows, step), pool.map(convert, range(0, rows, step)), strict=True):
                self._advance(info.nbytes * (min(start + step, rows) - start) // rows)
                if fault is not None:
                    self.faults.append(fault)
                    break
        return MatrixF32(values) if self.dense_bits == 32 else MatrixInt8(values, scales)

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(f"converting the dense weights to {self.dense_bits} bits", self.done, self.total)
