"""From measured times to the layers of each stage, and what that gains over cutting them evenly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.models.sizes import kv_bytes_per_token_per_layer, layer_sizes
from raypp.plan.engine_plan import EnginePlan
from raypp.plan.hardware import Hardware
from raypp.plan.layer_partition import LayerRoom, even_partition, fastest_partition
from raypp.plan.measure import MeasuredCosts
from raypp.plan.stage_memory import stage_budget_bytes, stage_weight_bytes


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to cut the layers, and the time that it predicts for a step of each stage."""

    layers: tuple[int, ...]
    stage_ms: tuple[float, ...]

    @property
    def slowest_ms(self) -> float:
        """The time of the slowest stage: a full pipeline finishes a step this often."""
        return max(self.stage_ms)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured, and the split that follows from it."""

    config: EngineConfig  # with the best split
    measured: MeasuredCosts
    best: Split
    even: Split
    default: Split  # what an engine takes without tuning
    max_layers: tuple[int, ...]  # that the memory of each stage holds, the smallest ones where they differ

    def gain_over(self, other: Split) -> float:
        """Return how many more steps per second a full pipeline makes than with another split: 0.1 is 10 %."""
        return other.slowest_ms / self.best.slowest_ms - 1.0

    def describe(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "model": self.config.model.model,
            "num_stages": self.config.parallel.num_stages,
            "measured": asdict(self.measured) | {"step": self.measured.step_text},
            "max_layers": list(self.max_layers),
            "splits": [
                {
                    "split": name,
                    "layers": list(split.layers),
                    "stage_ms": [round(ms, 4) for ms in split.stage_ms],
                    "slowest_ms": round(split.slowest_ms, 4),
                }
                for name, split in (("tuned", self.best), ("even", self.even), ("default", self.default))
            ],
            "gain_over_even": round(self.gain_over(self.even), 4),
            "gain_over_default": round(self.gain_over(self.default), 4),
        }

    def to_toml(self) -> str:
        """Return the configuration as TOML that `EngineConfig.from_toml` reads, with the figures as comments."""
        measured = self.measured
        comments = [
            f"Layers per stage by `raypp tune`, for {measured.step_text}.",
            f"Measured: layer {measured.layer_text} ms, embedding {measured.embedding_ms:.4g}, "
            f"LM head {measured.lm_head_ms:.4g}, sampler {measured.sampler_ms:.4g}.",
            f"Slowest stage {self.best.slowest_ms:.4g} ms; cut evenly, {list(self.even.layers)}, "
            f"{self.even.slowest_ms:.4g} ms ({self.gain_over(self.even):+.1%}).",
        ]
        return "\n".join(f"# {comment}" for comment in comments) + "\n\n" + self.config.to_toml()


def tune_partition(plan: EnginePlan, hardware: Hardware, measured: MeasuredCosts) -> Tuning:
    """Return the split whose slowest stage is fastest, by the times that were measured, among those that fit.

    Raises:
        ResourceError: no split fits the stages' memory.
    """
    num_layers, num_stages = plan.model.num_layers, plan.config.parallel.num_stages
    costs = measured.step_costs()
    room = layer_room(plan, hardware)

    def split(layers: list[int]) -> Split:
        return Split(layers=tuple(layers), stage_ms=tuple(costs.of_stages(layers)))

    best = fastest_partition(costs, num_stages, room)
    return Tuning(
        config=plan.config.with_settings(layer_partition=best),
        measured=measured,
        best=split(best),
        even=split(even_partition(num_layers, num_stages)),
        default=split([stage.num_layers for stage in plan.stages]),
        max_layers=tuple(room.most_layers()),
    )


def layer_room(plan: EnginePlan, hardware: Hardware) -> LayerRoom:
    """Return what layers take, with KV blocks for at least one longest request, and what each stage has for them."""
    model, dtype_bytes = plan.held_model, plan.dtype_bytes
    cache = plan.config.cache
    # Blocks that were asked for are needed; else as many as the longest request takes, and the null block.
    num_blocks = cache.num_kv_blocks or 1 + -(-plan.max_model_len // cache.block_size)
    kv_bytes = num_blocks * cache.block_size * kv_bytes_per_token_per_layer(model, plan.kv_dtype_bytes)
    besides = stage_weight_bytes(model, [0] * len(plan.stages), dtype_bytes)
    besides[-1] += plan.stages[-1].draft_head_bytes
    budget_bytes = stage_budget_bytes(plan.config, hardware, model, device=plan.device, dtype_bytes=dtype_bytes)
    return LayerRoom(
        layer_bytes=[size.weight_bytes + kv_bytes for size in layer_sizes(model, dtype_bytes)],
        stage_bytes=[budget_bytes - taken for taken in besides],
    )
