"""Reads from config.json what experts a model has and how they are chosen. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from raypp.models.config_fields import ConfigFields
from raypp.models.families import QWEN_EXPERTS, ExpertFamily, ExpertNames

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts")
"""Published checkpoints have one or the other by family; transformers 5 writes the second for all."""

_ONLY: dict[str, tuple[object, ...]] = {
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "routed_scaling_factor": (1,),
    "use_expert_bias": (False,),
    "moe_router_enable_expert_bias": (False,),
    "router_bias": (False,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
}
"""Fields of other expert models that change what is computed: the values that change nothing."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The experts of sparse layers: each token goes through some of many small MLPs, which its router chooses."""

    num_experts: int  # E
    num_chosen: int  # by token
    intermediate_size: int  # of one expert
    normalizes: bool  # whether the weights of a token's experts add up to 1
    names: ExpertNames = QWEN_EXPERTS  # in the checkpoint
    dense_layers: frozenset[int] = frozenset()  # layers with one MLP of `ModelConfig.intermediate_size` instead
    are_chosen_evenly: bool = False  # for measurements, see `raypp.ops.routing.Routing`


def read_experts(fields: ConfigFields, family: ExpertFamily, num_layers: int) -> ExpertConfig:
    """Return the experts of a model.

    Raises:
        ModelLoadError: a field is missing or wrong, or says of experts what raypp does not have.
    """
    for name, allowed in _ONLY.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            raise fields.error(
                name, repr(value), f"{' or '.join(map(repr, allowed))}, or nothing: raypp has no experts of that kind"
            )
    num_experts = _num_experts(fields)
    num_chosen = fields.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", num_chosen, f"at most the {num_experts} experts that there are")
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in dense):
        raise fields.error("mlp_only_layers", repr(dense), "a list of layers")
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.integer(family.intermediate_size),
        normalizes=fields.flag(family.normalizes),
        names=family.names,
        dense_layers=frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )


def _num_experts(fields: ConfigFields) -> int:
    said = [name for name in _NUMBERS_OF_EXPERTS if fields.get(name) is not None]
    numbers = {name: fields.integer(name) for name in said or _NUMBERS_OF_EXPERTS[:1]}
    if len(set(numbers.values())) > 1:
        raise fields.error(said[0], numbers[said[0]], f"the same as {said[1]}={numbers[said[1]]}")
    return next(iter(numbers.values()))
