"""What an engine is to be before its KV blocks are counted: device, type, layers, and what else each stage holds.

It can be had also where the memory does not suffice, so that `raypp info` can say what is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.models.config import ModelConfig, as_stored, load_model_config
from raypp.models.sizes import kv_bytes_per_token_per_layer
from raypp.plan.encoder_plan import EncoderPlan, plan_encoders
from raypp.plan.even_routing import with_even_routing
from raypp.plan.hardware import Hardware
from raypp.plan.kv_dtype import choose_kv_dtype
from raypp.plan.layer_partition import layers_per_stage
from raypp.plan.speculation_plan import (
    draft_head,
    draft_head_bytes,
    draft_head_spec,
    ngram_window,
    speculation_bytes,
)
from raypp.plan.stage_memory import StageMemory, memory_of_stages, stage_weight_bytes
from raypp.plan.weight_form import held_model, with_weight_form
from raypp.stage.stage_spec import DraftHeadSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """An engine without its KV blocks."""

    config: EngineConfig
    model_path: Path
    model: ModelConfig
    held_model: ModelConfig  # with the form that its weights have on the device: what sizes are counted of
    dtype: str
    kv_dtype: str  # of the KV cache
    device: str
    num_threads: int  # compute threads of a stage
    ngram_window: int  # 0 without speculation
    draft_head: DraftHeadSpec | None
    draft_head_bytes: int  # of weights, on the last stage
    encoders: EncoderPlan
    layers: tuple[int, ...]  # of each stage
    memory: tuple[StageMemory, ...]  # of each stage

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight, and of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def start_layers(self) -> list[int]:
        """The first layer of each stage."""
        return [sum(self.layers[:index]) for index in range(len(self.layers))]


def lay_out(config: EngineConfig, hardware: Hardware, find_model: Callable[[str, str | None], Path]) -> EngineLayout:
    """Decide all but the number of KV blocks.

    Args:
        config: What is asked for.
        hardware: What the stages will run on.
        find_model: Returns a model's directory, given its name and revision.

    Raises:
        ConfigError: settings that cannot work together or with this model.
        ModelLoadError: no such model, or one of an architecture that raypp does not have.
        ResourceError: there is no GPU, and one is asked for.
    """
    model_path = find_model(config.model.model, config.model.revision)
    read = load_model_config(
        model_path, rope_scaling=config.model.rope_scaling, max_model_len=config.model.max_model_len
    )
    described = with_even_routing(config, read)
    stored = described if config.model.load_format == "dummy" else as_stored(described, model_path)
    num_stages = config.parallel.num_stages
    device = _device(config, hardware)
    dtype = _dtype(config, stored, device)
    model = with_weight_form(config, stored, hardware, device=device, dtype=dtype)
    kv_dtype = choose_kv_dtype(config, model, hardware, device=device, dtype=dtype)
    dtype_bytes, kv_dtype_bytes = DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype]
    num_threads = config.parallel.stage_num_threads or hardware.threads_per_stage(num_stages)
    head, head_path = draft_head(config, model, hardware, device=device, dtype=dtype)
    held = held_model(model, hardware, device=device, dtype=dtype)
    layers = layers_per_stage(config, held, head, dtype_bytes, device)
    block_bytes = config.cache.block_size * kv_bytes_per_token_per_layer(model, kv_dtype_bytes)
    weight_bytes = stage_weight_bytes(held, layers, dtype_bytes)
    starts = [sum(layers[:index]) for index in range(num_stages)]
    head_spec = None if head is None else draft_head_spec(config, head_path, head, starts)
    window = ngram_window(config, model)
    stage_block_bytes = [count * block_bytes for count in layers]
    head_bytes = 0
    if head is not None:
        head_bytes = draft_head_bytes(head, model, num_stages, dtype_bytes)
        weight_bytes[-1] += head_bytes
        stage_block_bytes[-1] += config.cache.block_size * kv_bytes_per_token_per_layer(head.layer, kv_dtype_bytes)
    encoders = plan_encoders(
        config,
        model,
        hardware,
        model_path=str(model_path),
        device=device,
        dtype=dtype,
        dtype_bytes=dtype_bytes,
        num_threads=num_threads,
    )
    memory = memory_of_stages(
        config,
        hardware,
        model,
        device=device,
        dtype_bytes=dtype_bytes,
        weight_bytes=weight_bytes,
        block_bytes=stage_block_bytes,
        speculation_bytes=speculation_bytes(config, model, window, head_spec, dtype_bytes),
        item_bytes=encoders.item_bytes,
    )
    return EngineLayout(
        config=config,
        model_path=model_path,
        model=model,
        held_model=held,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        num_threads=num_threads,
        ngram_window=window,
        draft_head=head_spec,
        draft_head_bytes=head_bytes,
        encoders=encoders,
        layers=tuple(layers),
        memory=memory,
    )


def _device(config: EngineConfig, hardware: Hardware) -> str:
    asked = config.parallel.device
    if asked == "cuda" and not hardware.num_gpus:
        raise ResourceError(
            "there is no GPU for the stages",
            got="device=cuda, and no GPU on this machine or in the cluster",
            hint=hardware.complaint or "device=cpu computes without one",
        )
    if asked != "auto":
        return asked
    return "cuda" if hardware.num_gpus else "cpu"


def _dtype(config: EngineConfig, model: ModelConfig, device: str) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" else model.dtype
