"""What the encoders of an engine are to be, and how much of its pictures the first stage may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypp.config.engine import EngineConfig
from raypp.encoder.spec import EncoderSpec
from raypp.models.config import ModelConfig

if TYPE_CHECKING:
    from raypp.driver.engine_plan import EnginePlan


def item_token_bytes(model: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of one token of a picture on the first stage: its embedding, and a row per deepstack layer."""
    return (1 + model.num_deepstack_layers) * model.hidden_size * dtype_bytes


def max_item_tokens(plan: EnginePlan) -> int:
    """Return the tokens of pictures that the first stage may hold; 0 without encoders."""
    if not plan.num_encoders:
        return 0
    return plan.config.encoder.stage_embedding_bytes // item_token_bytes(plan.model, plan.dtype_bytes)


def item_bytes_on_first_stage(config: EngineConfig, model: ModelConfig) -> int:
    """Return what pictures take of the first stage's GPU: their embeddings, and the memory that encoders write into.

    Embeddings that leave may overlap with those that arrive; there is room for both.
    """
    if model.vision is None:
        return 0
    section = config.encoder
    return 2 * section.stage_embedding_bytes + section.num_encoders * section.link_embedding_bytes


def encoder_resources(plan: EnginePlan) -> dict[str, float]:
    """Return what an encoder asks Ray for."""
    resources = {"CPU": plan.config.encoder.encoder_num_cpus}
    if plan.device == "cuda":
        resources["GPU"] = plan.config.encoder.encoder_num_gpus
    return resources


def encoder_spec(plan: EnginePlan, index: int) -> EncoderSpec:
    """Return what an encoder must be told.

    Args:
        plan: Of the engine.
        index: Of the encoder.
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
        # In float32 attention waits for the device, see `raypp.ops.segment_attention`.
        captures=plan.device == "cuda" and config.graphs.mode != "none" and plan.dtype != "float32",
        token_budgets=None if section.token_budgets is None else tuple(section.token_budgets),
        max_images_per_batch=section.max_images_per_batch,
        memory_bytes=int(plan.gpu_memory_bytes * share),
        cache_bytes=section.encoder_cache_bytes,
        link_bytes=section.link_embedding_bytes,
    )


def describe_encoders(plan: EnginePlan) -> dict[str, Any] | None:
    """Return what the encoders are to be, as plain data; None when there are none."""
    if not plan.num_encoders:
        return None
    spec = encoder_spec(plan, 0)
    return {
        "num_encoders": plan.num_encoders,
        "resources": encoder_resources(plan),
        "memory_bytes": spec.memory_bytes,
        "token_budgets": None if spec.token_budgets is None else list(spec.token_budgets),
        "max_images_per_batch": spec.max_images_per_batch,
        "captures": spec.captures,
        "cache_bytes": spec.cache_bytes,
        "max_item_tokens_on_first_stage": max_item_tokens(plan),
        "item_bytes_on_first_stage": item_bytes_on_first_stage(plan.config, plan.model),
    }
