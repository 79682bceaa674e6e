"""What the encoders of an engine are to be, and how much of its images the first stage may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.encoder.protocol import EncoderSpec
from raypp.models.config import ModelConfig
from raypp.plan.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class EncoderPlan:
    """The encoders of an engine, and what they ask of others."""

    num_encoders: int  # actors: 0 for a model that reads text alone
    resources: dict[str, float]  # that each asks Ray for
    max_item_tokens: int  # of images that the first stage may hold
    item_bytes: int  # of the first stage's GPU: embeddings of images, and the memory that encoders write into
    first_spec: EncoderSpec  # of encoder 0

    def spec(self, encoder_index: int) -> EncoderSpec:
        """Return what an encoder must be told."""
        return replace(self.first_spec, encoder_index=encoder_index)

    def describe(self) -> dict[str, Any] | None:
        """Return what the encoders are to be, as plain data; None when there are none."""
        if not self.num_encoders:
            return None
        spec = self.first_spec
        return {
            "num_encoders": self.num_encoders,
            "resources": self.resources,
            "memory_bytes": spec.memory_bytes,
            "token_budgets": None if spec.token_budgets is None else list(spec.token_budgets),
            "max_images_per_batch": spec.max_images_per_batch,
            "captures": spec.captures,
            "cache_bytes": spec.cache_bytes,
            "max_item_tokens_on_first_stage": self.max_item_tokens,
            "item_bytes_on_first_stage": self.item_bytes,
        }


def plan_encoders(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    *,
    model_path: str,
    device: str,
    dtype: str,
    dtype_bytes: int,
    num_threads: int,
) -> EncoderPlan:
    """Decide what the encoders are to be.

    Args:
        config: What is asked for.
        model: Its sizes; text alone needs no encoders.
        hardware: The memory of a GPU.
        model_path: Where the model is.
        device: Of the stages, and so of the encoders.
        dtype: Of the model.
        dtype_bytes: Of one of its numbers.
        num_threads: Compute threads of a stage, and of an encoder where nothing else is asked for.
    """
    section = config.encoder
    num_encoders = 0 if model.vision is None else section.num_encoders
    resources = {"CPU": section.encoder_num_cpus}
    if device == "cuda":
        resources["GPU"] = section.encoder_num_gpus
    memory_share = config.cache.gpu_memory_utilization * section.encoder_num_gpus
    spec = EncoderSpec(
        encoder_index=0,
        model_path=model_path,
        load_format=config.model.load_format,
        dtype=dtype,
        device=device,
        seed=config.model.seed,
        num_threads=section.encoder_num_threads or num_threads,
        # In float32 attention waits for the device, see `raypp.ops.vision`.
        captures=device == "cuda" and config.graphs.mode != "none" and dtype != "float32",
        token_budgets=None if section.token_budgets is None else tuple(section.token_budgets),
        max_images_per_batch=section.max_images_per_batch,
        memory_bytes=int(hardware.gpu_memory_bytes * memory_share),
        cache_bytes=section.encoder_cache_bytes,
        link_bytes=section.link_embedding_bytes,
    )
    # Embeddings that leave may overlap with those that arrive; there is room for both.
    item_bytes = 2 * section.stage_embedding_bytes + num_encoders * section.link_embedding_bytes
    return EncoderPlan(
        num_encoders=num_encoders,
        resources=resources,
        max_item_tokens=section.stage_embedding_bytes // item_token_bytes(model, dtype_bytes) if num_encoders else 0,
        item_bytes=item_bytes if num_encoders else 0,
        first_spec=spec,
    )


def item_token_bytes(model: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of one token of an image on the first stage: its embedding, and a row per deepstack layer."""
    return (1 + model.num_deepstack_layers) * model.hidden_size * dtype_bytes
