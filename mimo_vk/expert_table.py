"""Where each routed expert's six tensors lie, checked in bulk: a release has 25,000 experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import overload

from mimo_vk.config import Config
from mimo_vk.safetensors_header import TensorInfo
from mimo_vk.tensor_names import (
    EXPERT_PARTS,
    SCALE_DTYPES,
    WEIGHT_DTYPES,
    Shape,
    expert_bytes,
    expert_names,
    expert_shapes,
)

Parts = tuple[TensorInfo, ...]
_SIGNATURE = attrgetter("dtype", "shape")


@dataclass(frozen=True)
class ExpertLocation:
    """``parts``: down, down scale, gate, gate scale, up, up scale. ``contiguous``: back to back in one file."""

    parts: Parts
    contiguous: bool


class LayerExperts(Sequence[ExpertLocation]):
    """One layer's experts by id."""

    def __init__(self, parts: list[Parts]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, expert: int) -> ExpertLocation: ...
    @overload
    def __getitem__(self, expert: slice) -> Sequence[ExpertLocation]: ...
    def __getitem__(self, expert: int | slice) -> ExpertLocation | Sequence[ExpertLocation]:
        if isinstance(expert, slice):
            return LayerExperts(self._parts[expert])
        parts = self._parts[expert]
        follows = (a.path == b.path and a.offset + a.nbytes == b.offset for a, b in pairwise(parts))
        return ExpertLocation(parts, all(follows))


class ExpertTable(Mapping[int, LayerExperts]):
    """``table[layer][expert]``, for the layers that have experts. ``expert_bytes``: bytes of one expert's tensors."""

    def __init__(self, layers: dict[int, LayerExperts], config: Config) -> None:
        self._layers = layers
        self.expert_bytes = expert_bytes(config)

    def __getitem__(self, layer: int) -> LayerExperts:
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def build_expert_table(
    config: Config,
    tensors: Mapping[str, TensorInfo],
    consumed: set[str],
    missing: Callable[[str], None],
    wrong: Callable[[TensorInfo, Sequence[str], Sequence[Shape]], None],
) -> ExpertTable:
    """The table of all MoE layers; adds the names it uses to ``consumed``, calls back for each tensor at fault."""
    shapes = expert_shapes(config)
    dtypes = [SCALE_DTYPES if part.endswith("_scale") else WEIGHT_DTYPES for part in EXPERT_PARTS]
    good: set[tuple[object, ...]] = set()  # signatures already found right: nearly every expert has the same one
    layers = {}
    for layer in (spec.index for spec in config.layers if spec.moe):
        experts: list[Parts] = []
        for expert in range(config.n_routed_experts):
            names = expert_names(layer, expert)
            consumed.update(names)
            found = tuple(map(tensors.get, names))
            experts.append(found)  # type: ignore[arg-type]  # None only until ``missing`` makes the caller give up
            if None in found:
                for name in names:
                    if name not in tensors:
                        missing(name)
                continue
            signature = tuple(map(_SIGNATURE, found))
            if signature in good:
                continue
            faults = [
                (info, allowed, [shape])
                for info, allowed, shape in zip(found, dtypes, shapes, strict=True)
                if info is not None and (info.dtype not in allowed or info.shape != shape)
            ]
            for fault in faults:
                wrong(*fault)
            if not faults:
                good.add(signature)
        layers[layer] = LayerExperts(experts)
    return ExpertTable(layers, config)
