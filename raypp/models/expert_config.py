"""Reads from config.json which experts sparse layers have, and how a router chooses them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from raypp.models.config_fields import ConfigFields
from raypp.models.families import QWEN_EXPERTS, ExpertFamily, ExpertNames

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Published checkpoints have one or the other by family; transformers 5 writes the second for most."""

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


_BY_BEST = "group_limited_greedy"
_OF_SIGMOID: dict[str, tuple[object, ...]] = {
    "n_group": (),
    "topk_group": (),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "routed_scaling_factor": (),
    "first_k_dense_replace": (),
    "shared_intermediate_size": (0,),
    "qk_norm_type": ("per_layer",),
}
"""The same of those whose scores are sigmoids; nothing: any value, which is read."""
_OF_GROUPS: dict[str, tuple[object, ...]] = {
    "n_group": (),
    "topk_group": (),
    "topk_method": ("greedy", _BY_BEST),
    "routed_scaling_factor": (),
    "first_k_dense_replace": (),
}
"""The same of those whose scores are a softmax, with groups."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The experts of sparse layers: each token goes through some of many small MLPs, which its router chooses."""

    num_experts: int  # E
    num_chosen: int  # by token
    intermediate_size: int  # of one expert
    normalizes: bool  # whether the weights of a token's experts add up to 1
    names: ExpertNames = QWEN_EXPERTS  # in the checkpoint
    dense_layers: frozenset[int] = frozenset()  # layers with one MLP of `ModelConfig.intermediate_size` instead
    are_chosen_evenly: bool = False  # for measurements, see `raypp.ops.backend.Routing`
    shared_size: int = 0  # of the MLP that all tokens go through besides; 0: there is none
    has_shared_gate: bool = True  # whether that is multiplied by the sigmoid of a product
    has_sigmoid: bool = False  # of the router, see `raypp.ops.backend.Routing`; and so are the following
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_ranking: int = 2
    scaling: float = 1.0
    has_pairs: bool = False  # see `ExpertFamily`
    gate_limit: float | None = None  # the most of a gate that is clamped, see `raypp.ops.backend.Gate`; None: any
    is_beside_mlp: bool = False  # see `ExpertFamily`
    num_parts: int = 1  # members that have as many whole experts each; 1: all have the same part of every expert

    @property
    def num_held(self) -> int:
        """How many of the experts a member has."""
        return self.num_experts // self.num_parts


def read_experts(fields: ConfigFields, family: ExpertFamily | None, num_layers: int) -> ExpertConfig | None:
    """Return the experts of a model, None if it is dense.

    Raises:
        ModelLoadError: a field is missing or wrong, or says of experts what raypp does not have.
    """
    if family is None or (family.switch is not None and not fields.flag(family.switch)):
        return None
    known = {**_ONLY, **(_OF_SIGMOID if family.has_sigmoid else _OF_GROUPS if family.has_groups else {})}
    if family.normalizes is False:
        known["norm_topk_prob"] = (False,)
    for name, allowed in known.items():
        value = None if name == family.shared else fields.get(name)
        if value is not None and allowed and value not in allowed:
            raise fields.error(
                name, repr(value), f"{' or '.join(map(repr, allowed))}, or nothing: raypp has no experts of that kind"
            )
    num_experts = _num_experts(fields)
    num_chosen = fields.integer(family.num_chosen)
    if num_chosen > num_experts:
        raise fields.error(family.num_chosen, num_chosen, f"at most the {num_experts} experts that there are")
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in dense):
        raise fields.error("mlp_only_layers", repr(dense), "a list of layers")
    first, kinds = fields.integer("first_k_dense_replace", 0, least=0), fields.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
            raise fields.error("mlp_layer_types", kinds, f"{num_layers} of dense, sparse")
        first, dense = 0, [*dense, *(layer for layer, kind in enumerate(kinds) if kind == "dense")]
    num_groups, num_chosen_groups = (fields.integer(name, 1) for name in ("n_group", "topk_group"))
    if family.num_ranking == 1 and fields.get("topk_method") != _BY_BEST:
        num_groups = num_chosen_groups = 1
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise fields.error("n_group", num_groups, f"a divisor of {num_experts} experts, with two or more in each")
    if num_chosen_groups > num_groups:
        raise fields.error("topk_group", num_chosen_groups, f"at most n_group={num_groups}")
    in_groups = num_experts // num_groups * num_chosen_groups
    if num_chosen > in_groups:
        raise fields.error(family.num_chosen, num_chosen, f"at most the {in_groups} experts of topk_group groups")
    size = fields.integer(family.intermediate_size)
    shared_size = 0 if family.shared is None else fields.integer(family.shared)
    limit = None if family.gate_limit is None else fields.number("swiglu_limit", family.gate_limit)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        normalizes=fields.flag(family.normalizes),
        names=family.names,
        dense_layers=frozenset(
            layer for layer in range(num_layers) if layer < first or layer in dense or (layer + 1) % step
        ),
        shared_size=shared_size * size if family.counts_shared else shared_size,
        has_shared_gate=not family.counts_shared,
        has_sigmoid=family.has_sigmoid,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        num_ranking=family.num_ranking if num_groups > 1 else 2,
        scaling=fields.number("routed_scaling_factor", 1.0),
        has_pairs=family.has_pairs,
        gate_limit=limit,
        is_beside_mlp=family.is_beside_mlp,
    )


def _num_experts(fields: ConfigFields) -> int:
    said = [name for name in _NUMBERS_OF_EXPERTS if fields.get(name) is not None]
    numbers = {name: fields.integer(name) for name in said or _NUMBERS_OF_EXPERTS[:1]}
    if len(set(numbers.values())) > 1:
        raise fields.error(said[0], numbers[said[0]], f"the same as {said[1]}={numbers[said[1]]}")
    return next(iter(numbers.values()))
