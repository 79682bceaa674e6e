"""Whether an engine fits its machines, and how many requests it then holds: by the plan that a start would make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.models.registry import resolve_config_path
from raypp.models.sizes import parameter_counts
from raypp.plan.engine_layout import EngineLayout, lay_out
from raypp.plan.engine_plan import EnginePlan, plan_layout
from raypp.plan.hardware import Hardware
from raypp.plan.machines import Machine, num_machines_for
from raypp.plan.stage_memory import check_one_machine

REQUEST_LENGTHS = (2048, 8192, 32768)
"""Tokens of the requests that are counted, besides the longest that can be: prompt and output together."""
_TYPICAL_LENGTH = 8192


@dataclass(frozen=True, kw_only=True)
class Fit:
    """An engine and the machines that it is planned for."""

    config: EngineConfig
    hardware: Hardware
    machines: tuple[Machine, ...] | None  # None: how many GPUs there are is not known
    layout: EngineLayout
    plan: EnginePlan | None  # None: it does not fit
    problem: ResourceError | None  # what it lacks
    num_machines: int | None  # over which its stages and encoders are spread

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds, over all requests; 0 if the engine does not fit."""
        return 0 if self.plan is None else (self.plan.num_blocks - 1) * self.config.cache.block_size

    @property
    def num_cpu_kv_tokens(self) -> int:
        """Tokens whose KV fits into CPU memory besides."""
        return 0 if self.plan is None else self.plan.num_cpu_blocks * self.config.cache.block_size

    def requests_held(self, num_tokens: int) -> int:
        """Return how many requests of that many tokens, prompt and output together, the KV cache holds."""
        if self.plan is None:
            return 0
        limits = self.plan.scheduler_limits()
        return limits.num_usable_blocks // limits.num_blocks_for(num_tokens)

    def num_requests(self, num_tokens: int) -> int:
        """Return how many requests of that many tokens run at once: `max_num_seqs` limits them, too."""
        return min(self.requests_held(num_tokens), self.config.scheduler.max_num_seqs)

    def request_lengths(self) -> list[int]:
        """Return the lengths to count requests of, in tokens, ascending."""
        if self.plan is None:
            return []
        longest = self.plan.max_model_len
        return [*(length for length in REQUEST_LENGTHS if length < longest), longest]

    def describe(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        problem, form = self.problem, self.layout.held_model.quantization
        total, active = parameter_counts(self.layout.model)
        return {
            "fits": self.plan is not None,
            "problem": None if problem is None else {"message": problem.message, **_details(problem)},
            "model": self.config.model.model,
            "architecture": self.layout.model.architecture,
            "num_parameters": total,
            "num_active_parameters": active,
            "has_experts": self.layout.model.experts is not None,
            "quantization": None if form is None else form.format,
            "dtype": self.layout.dtype,
            "kv_cache_dtype": self.layout.kv_dtype,
            "device": self.layout.device,
            "complaint": self.hardware.complaint if self.config.parallel.device == "auto" else None,
            "machines": None if self.machines is None else [asdict(machine) for machine in self.machines],
            "num_machines_used": self.num_machines,
            "gpu_memory_utilization": self.config.cache.gpu_memory_utilization,
            "stage_num_gpus": self.config.parallel.stage_num_gpus,
            "encoders": self.layout.encoders.describe(),
            "num_kv_tokens": self.num_kv_tokens,
            "num_cpu_kv_tokens": self.num_cpu_kv_tokens,
            "max_model_len": None if self.plan is None else self.plan.max_model_len,
            "asked_max_model_len": self.config.model.max_model_len,
            "model_max_len": self.layout.model.max_position_embeddings,
            "max_num_seqs": self.config.scheduler.max_num_seqs,
            "requests": [
                {
                    "num_tokens": length,
                    "num_requests": self.num_requests(length),
                    "kv_cache_holds": self.requests_held(length),
                }
                for length in self.request_lengths()
            ],
            "stages": [self._stage(index) for index in range(len(self.layout.layers))],
        }

    def _stage(self, index: int) -> dict[str, Any]:
        memory, start = self.layout.memory[index], self.layout.start_layers[index]
        kv_bytes = None if self.plan is None else memory.kv(self.plan.num_blocks)
        cpu_kv_bytes = 0 if self.plan is None else memory.kv(self.plan.num_cpu_blocks)
        of_share = cpu_kv_bytes if self.layout.device == "cpu" else 0
        return {
            "stage_index": index,
            "layers": [start, start + self.layout.layers[index]],
            **asdict(memory),
            "kv_cache_bytes": kv_bytes,
            "cpu_kv_bytes": cpu_kv_bytes,
            "left_bytes": memory.share_bytes - memory.taken_bytes - (kv_bytes or 0) - of_share,
        }


def check_fit(
    config: EngineConfig,
    hardware: Hardware,
    machines: tuple[Machine, ...] | None,
    find_model: Callable[[str, str | None], Path] = resolve_config_path,
) -> Fit:
    """Plan an engine, and say what it lacks if it does not fit.

    Args:
        config: Of the engine.
        hardware: What its stages will run on.
        machines: The GPUs of each machine; None: not known, there are as many as are asked for.
        find_model: Returns a directory with a model's config.json, given its name and revision.

    Raises:
        ConfigError, ModelLoadError: it could run on no machine.
        ResourceError: it is to compute on GPUs, and there are none.
    """
    layout = lay_out(config, hardware, find_model)
    plan, problem, num_machines = None, None, None
    try:
        if layout.device == "cuda" and machines is not None:
            num_machines = _placed(layout, machines)
        plan = plan_layout(layout, hardware)
        if layout.device == "cpu" and machines is not None:  # else there may be others in the cluster
            check_one_machine(layout.memory, plan.num_blocks + plan.num_cpu_blocks)
    except ResourceError as error:
        plan, problem = None, error
    return Fit(
        config=config,
        hardware=hardware,
        machines=machines,
        layout=layout,
        plan=plan,
        problem=problem,
        num_machines=num_machines,
    )


def typical_length(fit: Fit) -> int:
    """Return the tokens of the requests that one figure is about: 8,192, or the longest where that is less."""
    asked = min(fit.config.model.max_model_len or _TYPICAL_LENGTH, fit.layout.model.max_position_embeddings)
    longest = asked if fit.plan is None else fit.plan.max_model_len
    return min(_TYPICAL_LENGTH, longest)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s but after 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _details(error: ResourceError) -> dict[str, Any]:
    return {name: str(value) for name in ("got", "expected", "hint") if (value := getattr(error, name)) is not None}


def gpu_shares(layout: EngineLayout) -> list[float]:
    """Return the share of a GPU that each stage and each encoder asks for."""
    stages = [layout.config.parallel.stage_num_gpus] * len(layout.layers)
    return stages + [layout.config.encoder.encoder_num_gpus] * layout.encoders.num_encoders


def _placed(layout: EngineLayout, machines: Sequence[Machine]) -> int:
    """Return over how many machines stages and encoders are spread.

    Raises:
        ResourceError: they find no room.
    """
    shares, strategy = gpu_shares(layout), layout.config.parallel.placement
    num_machines = num_machines_for(shares, machines, strategy)
    if num_machines is None:
        num_gpus = sum(machine.num_gpus for machine in machines)
        encoders = f" and {counted(layout.encoders.num_encoders, 'encoder')}" if layout.encoders.num_encoders else ""
        raise ResourceError(
            "there are too few GPUs",
            got=f"{counted(num_gpus, 'GPU')} on {counted(len(machines), 'machine')}, placement={strategy}",
            expected=f"room for {counted(len(layout.layers), 'stage')}{encoders}, which ask for {sum(shares):g} GPUs",
        )
    return num_machines
