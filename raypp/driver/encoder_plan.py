"""What the encoders of an engine are to be, and how much of its pictures the first stage may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypp.encoder.spec import EncoderSpec
from raypp.models.config import ModelConfig

if TYPE_CHECKING:
    from raypp.driver.engine_plan import EnginePlan


def item_token_bytes(model: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of one token of a picture on the first stage: its embedding, and a row per deepstack layer."""
    return (1 + model.num_deepstack_layers) * model.hidden_size * dtype_bytes


def encoder_spec(plan: EnginePlan, index: int, gpu_memory_bytes: int) -> EncoderSpec:
    """Return what an encoder must be told.

    Args:
        plan: Of the engine.
        index: Of the encoder.
        gpu_memory_bytes: Of a GPU.
    """
    section, config = plan.config.encoder, plan.config
    share = config.cache.gpu_memory_utilization * section.encoder_num_gpus
    return EncoderSpec(
        encoder_index=index,
        model_path=plan.model_path,
        load_format=config.model.load_format,
        dtype=plan.dtype,
        device=plan.device,
        seed=config.model.seed,
        num_threads=section.encoder_num_threads or plan.num_threads,
        captures=plan.device == "cuda" and config.graphs.mode != "none",
        token_budgets=None if section.token_budgets is None else tuple(section.token_budgets),
        max_images_per_batch=section.max_images_per_batch,
        memory_bytes=int(gpu_memory_bytes * share),
        cache_bytes=section.encoder_cache_bytes,
        link_bytes=section.link_embedding_bytes,
    )
