"""Cuts a model for the members of a stage: each has some of the heads, of the MLP's dimensions, and of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from raypp.errors import ConfigError
from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig, LayerMixer, ModulesConfig
from raypp.models.config import ModelConfig, member_of_modules
from raypp.models.expert_config import ExpertConfig
from raypp.models.sizes import layer_prefix

_MOST = 64


class Span(NamedTuple):
    """Some of a dimension: the part that a member of a stage has."""

    start: int
    size: int
    total: int  # of the whole dimension

    @property
    def stop(self) -> int:
        """The first behind it."""
        return self.start + self.size

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dimension."""
        return self.size == self.total

    @property
    def slice(self) -> slice:
        """The same as an index."""
        return slice(self.start, self.stop)

    def by(self, unit: int) -> Span:
        """Return the same where so many make one, which it begins and ends with, or ends the dimension."""
        start = self.start // unit
        return Span(start, -(-self.stop // unit) - start, -(-self.total // unit))

    def widened(self, unit: int) -> Span:
        """Return the smallest part that has it, and begins and ends with a unit, or ends the dimension."""
        start = self.start // unit * unit
        return Span(start, min(-(-self.stop // unit) * unit, self.total) - start, self.total)

    def within(self, other: Span) -> Span:
        """Return it as a part of another part that has it."""
        return Span(self.start - other.start, self.size, other.size)


Size = int | Span
"""Of a dimension: all of it, or a part of it."""


@dataclass(frozen=True)
class Member:
    """One of the members of a stage, which share its weights."""

    rank: int = 0
    count: int = 1

    def part(self, size: int, num_sharing: int = 1) -> Span:
        """Return the member's part of a dimension that is cut evenly.

        Args:
            size: Of the part.
            num_sharing: Members that follow each other and have the same part.
        """
        return Span(self.rank // num_sharing * size, size, self.count // num_sharing * size)


ONLY_MEMBER = Member()
"""Of a stage that has one."""


def span_of(size: Size) -> Span:
    """Return a size as a part; it may be all."""
    return size if isinstance(size, Span) else Span(0, size, size)


def of_one_member(
    config: ModelConfig,
    count: int,
    *,
    part: str = "a stage",
    path: Path | None = None,
    whole_experts: bool | None = None,
) -> ModelConfig:
    """Return the sizes of one of `count` members; they are alike for all.

    Where there are fewer KV heads than members, several members have the same ones.

    Args:
        config: Whole.
        count: Of the members.
        part: What it is of, for errors.
        path: The model's directory, for transformers' modules.
        whole_experts: Whether a member has some of the experts, or a part of each; None: some of them where a part
            would have no form that kernels multiply.

    Raises:
        ConfigError: what cannot be cut into so many parts.
    """
    if count == 1:
        return config
    if whole_experts and (config.experts is None or config.measured is not None):
        layers = "transformers' modules" if config.measured is not None else "layers without experts"
        raise ConfigError(
            "only raypp's own layers with experts can be cut into whole experts per member",
            got=f"enable_expert_parallel=true, {config.architecture} of {layers}",
            hint="leave enable_expert_parallel out",
        )
    if config.measured is not None and not any(layer.cuts for layer in config.measured):
        raise ConfigError(
            "the members of a stage cannot share its weights: no attention, MLP or experts that raypp knows how to cut",
            got=f"tensor_parallel_size={count}, {config.architecture}",
            expected="tensor_parallel_size = 1",
            hint=f"num_stages={count} divides the layers instead",
        )
    if why := _obstacle(config, count, whole_experts):
        possible = [other for other in range(1, _MOST + 1) if not _obstacle(config, other, whole_experts)]
        raise ConfigError(
            f"the weights of {part} cannot be cut into parts of equal size",
            got=f"tensor_parallel_size={count}, {why}",
            expected=f"one of {', '.join(map(str, possible))} for {config.architecture} of this size",
        )
    if config.measured is not None:
        assert path is not None
        return member_of_modules(config, path, count)
    experts = config.experts
    if experts is not None:
        num_parts = count if _has_whole_experts(config, experts, count, whole_experts) else 1
        experts = replace(
            experts,
            num_parts=num_parts,
            intermediate_size=experts.intermediate_size * num_parts // count,
            shared_size=experts.shared_size // count,
        )
    return replace(
        config,
        num_members=count,
        intermediate_size=config.intermediate_size // count,
        attention=tuple(_mixer(layer, count) for layer in config.attention),
        experts=experts,
    )


def part_of_experts(experts: ExpertConfig, member: Member) -> Span:
    """Return which experts of a layer a member has, whole or a part of each."""
    return member.part(experts.num_held, member.count // experts.num_parts)


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


def _has_whole_experts(config: ModelConfig, experts: ExpertConfig, count: int, asked: bool | None) -> bool:
    """Return whether a member has whole experts: if asked for, or if only these keep the form of their weights."""
    if asked is not None:
        return asked
    (size, rest), form = divmod(experts.intermediate_size, count), config.quantization
    first = next((index for index in range(config.num_layers) if config.experts_of(index)), 0)
    module = f"{layer_prefix(config, first)}{experts.names.block}experts.0.{experts.names.down}"
    if form is not None and form.has_gpu_product and not form.has_order and form.covers(module):
        rest = rest or not replace(form, is_for_gpus=True).is_kept(size, is_part=True, is_of_experts=True)
    return bool(rest) and experts.num_experts % count == 0


def _obstacle(config: ModelConfig, count: int, whole_experts: bool | None) -> str | None:
    """Return what does not divide, None if all does."""
    if config.measured is not None:
        cuts = (cut for layer in config.measured for cut in layer.cuts)
        return next((f"{n} {name}" for name, n, shared in cuts if n % count and not (shared and count % n == 0)), None)
    experts, sizes = config.experts, dict[str, int]()
    for mixer in config.attention:
        if isinstance(mixer, AttentionConfig):
            if mixer.num_kv_heads % count and count % mixer.num_kv_heads:
                return f"{mixer.num_kv_heads} KV heads"
            sizes["heads"] = mixer.num_heads
        elif isinstance(mixer, GatedDeltaConfig):
            sizes["heads of keys with a state"] = mixer.num_k_heads
    if experts is None or experts.dense_layers or experts.is_beside_mlp:
        sizes["dimensions of the MLP"] = config.intermediate_size
    if experts is not None:
        if _has_whole_experts(config, experts, count, whole_experts):
            sizes["experts"] = experts.num_experts
        else:
            others = "" if whole_experts is False else f", and {experts.num_experts} experts"
            sizes[f"dimensions of an expert{others}"] = experts.intermediate_size
        sizes["dimensions of the shared expert"] = experts.shared_size
    return next((f"{size} {name}" for name, size in sizes.items() if size % count), None)
