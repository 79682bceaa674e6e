"""Cuts a model for the members of a stage: each has some of the heads, of the MLP's dimensions, and of the tokens."""

from __future__ import annotations

from dataclasses import replace

from raypp.errors import ConfigError
from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig, LayerMixer, ModulesConfig
from raypp.models.config import ModelConfig

_MOST = 64


def of_one_member(config: ModelConfig, count: int, *, part: str = "a stage") -> ModelConfig:
    """Return the sizes of one of `count` members; they are alike for all.

    Where there are fewer KV heads than members, several members have the same ones.

    Args:
        config: Whole.
        count: Of the members.
        part: What it is of, for errors.

    Raises:
        ConfigError: what cannot be cut into so many parts.
    """
    if count == 1:
        return config
    if config.measured is not None:
        raise ConfigError(
            "members of a stage have parts of raypp's own layers",
            got=f"tensor_parallel_size={count}, and a model of transformers' modules",
            expected="tensor_parallel_size = 1, or an architecture with layers of raypp's own",
        )
    if why := _obstacle(config, count):
        possible = [other for other in range(1, _MOST + 1) if not _obstacle(config, other)]
        raise ConfigError(
            f"the weights of {part} cannot be cut into parts of equal size",
            got=f"tensor_parallel_size={count}, {why}",
            expected=f"one of {', '.join(map(str, possible))} for {config.architecture} of this size",
        )
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // count,
            shared_size=experts.shared_size // count,
        )
    return replace(
        config,
        num_members=count,
        intermediate_size=config.intermediate_size // count,
        attention=tuple(_mixer(layer, count) for layer in config.attention),
        experts=experts,
    )


def _mixer(layer: LayerMixer, count: int) -> LayerMixer:
    assert not isinstance(layer, ModulesConfig), "of transformers' modules"
    if isinstance(layer, GatedDeltaConfig):
        return replace(layer, num_k_heads=layer.num_k_heads // count, num_v_heads=layer.num_v_heads // count)
    return replace(
        layer,
        num_heads=layer.num_heads // count,
        num_kv_heads=max(1, layer.num_kv_heads // count),
        num_sharing=max(1, count // layer.num_kv_heads),
    )


def _obstacle(config: ModelConfig, count: int) -> str | None:
    """Return what does not divide, None if all does."""
    experts, sizes = config.experts, dict[str, int]()
    for layer in config.attention:
        if isinstance(layer, AttentionConfig):
            if layer.num_kv_heads % count and count % layer.num_kv_heads:
                return f"{layer.num_kv_heads} KV heads"
            sizes["heads"] = layer.num_heads
        elif isinstance(layer, GatedDeltaConfig):
            sizes["heads of keys with a state"] = layer.num_k_heads
    if experts is None or experts.dense_layers:
        sizes["dimensions of the MLP"] = config.intermediate_size
    if experts is not None:
        sizes["dimensions of an expert"] = experts.intermediate_size
        sizes["dimensions of the shared expert"] = experts.shared_size
    return next((f"{size} {name}" for name, size in sizes.items() if size % count), None)
