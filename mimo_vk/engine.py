"""The engine: a checkpoint opened once, with its backend, expert cache, tokenizer and template; sessions run on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import cast

from mimo_vk.budget import Plan, plan_for
from mimo_vk.chat_format import ChatTemplate
from mimo_vk.checkpoint import Checkpoint
from mimo_vk.config import GenerationConfig, load_config, load_generation_config
from mimo_vk.errors import CheckpointError
from mimo_vk.experts import ExpertCache
from mimo_vk.formats import F32
from mimo_vk.kv_cache import KvCache
from mimo_vk.model import Experts, Model, PictureRows
from mimo_vk.moe import CachedExperts
from mimo_vk.ops import Ops, VisionOps
from mimo_vk.pictures import Gallery, Pictures, PictureTools, Progress, Tower, load_tools
from mimo_vk.progress import ticking
from mimo_vk.session import Session
from mimo_vk.settings import Settings
from mimo_vk.stats import Stats, TimedOps
from mimo_vk.tokenizer import Tokenizer
from mimo_vk.vision import VisionTower
from mimo_vk.vision_weights import VisionWeights
from mimo_vk.vulkan.dense_cache import DeviceKvCache
from mimo_vk.vulkan.dense_model import PlacedModel
from mimo_vk.vulkan.listing import DeviceInfo
from mimo_vk.vulkan.placed_tower import PlacedTower
from mimo_vk.vulkan.setup import OnDevice, open_device, plan_device
from mimo_vk.vulkan.tiered_experts import TieredExperts
from mimo_vk.warm_up import warm_up
from mimo_vk.weights import Weights, load_weights

log = logging.getLogger("mimo_vk")
LoadProgress = Callable[[str, int, int], None]


class Engine:
    """Weights, backend and text tools of one checkpoint. Open it with ``Engine.open``; close it when done."""

    def __init__(self, settings: Settings, progress: LoadProgress | None = None) -> None:
        began = time.perf_counter()
        self.settings = settings
        self.stats = Stats()
        self.model_dir = settings.model or shipped_model()
        self.model_name = self.model_dir.resolve().name
        self.config, self.warnings = load_config(self.model_dir / "config.json")
        if settings.model is None:
            self.warnings.insert(0, "no --model: this is the small demonstration model that comes with mimo-vk")
        self.generation = _generation(self.model_dir)
        self.ctx = min(settings.ctx, self.config.max_position_embeddings)
        self.chunk = min(settings.chunk, self.ctx)
        checkpoint = Checkpoint.open(self.model_dir, settings.dirs)
        device_plan, line = plan_device(settings, self.config, self.ctx, self.chunk)
        self.notices = [line] if line else []  # about the device, for the user
        self.plan: Plan = plan_for(checkpoint, self.config, settings, device_plan.ram_bytes if device_plan else 0)
        self.tokenizer, self.template = _text_tools(self.model_dir)
        with ExitStack() as undo:  # the device process starts while the weights load
            client = undo.enter_context(device_plan.start()) if device_plan else None
            weights = load_weights(checkpoint, self.config, settings.dense_bits, progress, settings.threads)
            on_device = OnDevice()
            if client is not None and device_plan is not None:
                on_device = open_device(client, device_plan, weights, settings.tier_rate, self.notices, progress)
            self.tier, self.dense = on_device.tier, on_device.dense
            with ticking(progress, "loading the kernels (the first start compiles them)"):
                self._ops = make_ops(settings.backend, settings.threads)
                warm_up(self._ops, self.config)
            readers, direct = settings.read_threads, settings.direct
            self.cache = undo.enter_context(ExpertCache(weights.experts, self.plan.cap, readers=readers, direct=direct))
            self._open = undo.pop_all()
        if self.dense is not None:
            self.chunk = min(self.chunk, self.dense.max_rows)
        timed = cast(Ops, TimedOps(self._ops, self.stats))
        experts = TieredExperts(timed, self.cache, self.tier) if self.tier else CachedExperts(timed, self.cache)
        self.model = self._model(weights, timed, experts)
        self._head = self._model(weights, self._ops, experts)
        self.tower: Tower | None = None
        if weights.vision is not None:
            self.tower = self._tower(weights.vision)
        self.backend = self._ops.name
        self.stats.load_seconds = time.perf_counter() - began

    @classmethod
    def open(cls, settings: Settings, progress: LoadProgress | None = None) -> Engine:
        """Open the checkpoint that the settings name (or the shipped one). Errors: CheckpointError, UsageError."""
        return cls(settings, progress)

    def _model(self, weights: Weights, ops: Ops, experts: Experts) -> Model:
        return Model(weights, ops, experts) if self.dense is None else PlacedModel(weights, ops, experts, self.dense)

    def _tower(self, weights: VisionWeights) -> VisionTower:
        sink = self.settings.vision_sink
        if self.dense is None or self.dense.tower is None:
            return VisionTower(weights, self._ops, sink)
        return PlacedTower(weights, self._ops, sink, self.dense)

    def new_cache(self) -> KvCache:
        """An empty KV cache of the engine's context."""
        if self.dense is None:
            return KvCache(self.config, self.ctx)
        return DeviceKvCache(self.config, self.ctx, self.dense)

    @property
    def device(self) -> DeviceInfo | None:
        """The device that is used, whatever for."""
        part = self.tier or self.dense
        return part.client.info if part else None

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: generation_config.json's, else config.json's."""
        return frozenset(self.generation.eos_token_ids or self.config.eos_token_ids)

    @property
    def vocab_limit(self) -> int:
        """Ids from here on are never sampled: the vocabulary's tail has no text."""
        size = self.config.vocab_size
        return min(size, self.tokenizer.size) if self.tokenizer else size

    def session(self) -> Session:
        """A new, empty session."""
        return Session(self)

    @cached_property
    def picture_tools(self) -> PictureTools:
        """What finds room for pictures in a prompt. Errors: UsageError without a tower; CheckpointError."""
        return load_tools(self.model_dir, self.config, self.settings)

    @cached_property
    def _gallery(self) -> Gallery:
        tools = self.picture_tools
        assert self.tower is not None, "a checkpoint whose config has a tower is opened with it"
        return Gallery(self.tower, tools.limits)

    def picture_rows(
        self, pictures: Pictures, on_progress: Progress | None, checkpoint: Callable[[], None]
    ) -> PictureRows:
        """The rows of a prompt's pictures, timed. Errors: ImageError; whatever ``checkpoint`` raises."""
        gallery, began, before = self._gallery, time.perf_counter(), self._gallery.seen
        try:
            return gallery.rows(pictures, on_progress, checkpoint)
        finally:
            seconds = time.perf_counter() - began
            self.stats.pictures += gallery.seen - before
            self.stats.picture_seconds += seconds
            self.stats.add("pictures", seconds)

    def head(self, h: F32) -> F32:
        """Logits of hidden rows, timed as a part of their own."""
        began = time.perf_counter()
        logits = self._head.logits(h)
        self.stats.add("head", time.perf_counter() - began)
        return logits

    def snapshot_stats(self) -> Stats:
        """The counters so far, with those of the expert cache."""
        cache = self.cache.stats
        self.stats.expert_hits, self.stats.expert_misses = cache.hits, cache.misses
        self.stats.bytes_read = cache.bytes_read
        self.stats.parts["disk"] = cache.wait_seconds
        if self.tier is not None:
            self.tier.count(self.stats)
        if self.dense is not None:
            self.dense.count(self.stats)
        return self.stats

    def close(self) -> None:
        """End the device process and the readers, and let go of the cache's memory."""
        self._open.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def shipped_model() -> Path:
    """The small checkpoint that comes with the package."""
    return Path(str(resources.files("mimo_vk"))) / "demo"


def make_ops(backend: str, threads: int) -> VisionOps:
    """The CPU backend: "numba", "numpy", or "auto" (numba where it can be imported). All return the same bytes."""
    if backend != "numpy":
        try:
            from cpu_fallback.compiled import CompiledOps

            return CompiledOps(threads)
        except ImportError as error:
            if backend == "numba":
                raise
            log.warning("numba is not usable here (%s): running on numpy, several times slower", error)
    from cpu_fallback.reference import ReferenceOps

    return ReferenceOps()


def _generation(model_dir: Path) -> GenerationConfig:
    return load_generation_config(model_dir / "generation_config.json")


def _text_tools(model_dir: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and template, each None where the checkpoint has none: ids alone can then be run."""
    tokenizer = Tokenizer.load(model_dir) if (model_dir / "tokenizer.json").exists() else None
    try:
        template = ChatTemplate.load(model_dir)
    except CheckpointError:
        if (model_dir / "chat_template.jinja").exists():
            raise  # a broken template is a fault; an absent one only rules out chat
        template = None
    return tokenizer, template
