"""The part of transformers' modules that a member of a stage has, by the plan that these come with.

    colwise            rows of a linear layer's weight: heads, or dimensions of an MLP
    packed_colwise     the same of several parts that lie one after the other in a weight: gate and up of all experts
    rowwise            columns, or of experts the last dimension: outputs are summed over the members
    moe_tp_experts     experts with both of these: outputs are summed
    all others         whole on each member

Source of the plan: `base_model_tp_plan` of transformers' configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from raypp.errors import ModelLoadError
from raypp.models.member_sizes import Member
from raypp.ops.sample.vocabulary_part import VocabularyPart

_EXPERTS = "moe_tp_experts"
_OF_KV = ("k_proj", "v_proj")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along a dimension, in which `num_packed` parts lie one after the other.

    Args:
        dim: The dimension.
        num_packed: Parts, each of which is cut.
        num_sharing: Members that follow each other and have the same: of KV heads, where there are fewer than members.
    """

    dim: int
    num_packed: int = 1
    num_sharing: int = 1

    def of(self, tensor: Any, member: Member) -> torch.Tensor:
        """Return the member's part of a tensor, or of a slice of a file, of which no more is read."""
        shape = list(tensor.get_shape()) if hasattr(tensor, "get_shape") else list(tensor.shape)
        dim, packed = self.dim % len(shape), shape[self.dim] // self.num_packed
        size = packed * self.num_sharing // member.count
        part = member.part(size, self.num_sharing)
        begins = [index * packed + part.start for index in range(self.num_packed)]
        before = (slice(None),) * dim
        parts = [tensor[(*before, slice(begin, begin + size))] for begin in begins]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True, eq=False)
class SlicedTensor:
    """A tensor of a checkpoint, of which a member reads its part; what transformers reads of a file's slice."""

    whole: Any
    read: Callable[[Any], torch.Tensor]

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.read(self.whole)

    def get_dtype(self) -> str:
        """Return the type's name, as safetensors has it."""
        name: str = self.whole.get_dtype()
        return name


@dataclass(frozen=True, eq=False)
class ModuleParts:
    """What is cut of a model, and whose outputs are summed."""

    cuts: Mapping[str, Cut]
    """By names of parameters."""
    summed: frozenset[str]
    """Names of modules: linear layers, and those of all experts."""


def parts_of(model: Any, count: int) -> ModuleParts:
    """Return how the layers of transformers' model are cut for `count` members.

    Raises:
        ModelLoadError: it has no plan, or one that cuts what raypp cannot.
    """
    plan = {name: style for name, style in (model.tp_plan or {}).items() if ".layers." in name}
    cuts, summed = dict[str, Cut](), set[str]()
    num_kv_heads = getattr(model.config, "num_key_value_heads", None) or count
    num_sharing = max(1, count // num_kv_heads)
    for name, module in model.named_modules():
        style = plan.get(_pattern(name))
        if type(module) is nn.Linear and style in ("colwise", "packed_colwise", "rowwise"):
            if style == "rowwise":
                cuts[f"{name}.weight"] = Cut(1)
                summed.add(name)
                continue
            cut = Cut(0, 2 if style == "packed_colwise" else 1, num_sharing if name.endswith(_OF_KV) else 1)
            cuts |= {f"{name}.{each}": cut for each, parameter in module._parameters.items() if parameter is not None}
        elif style == _EXPERTS:
            cuts |= _cuts_of_experts(model, name, module, plan)
            summed.add(name)
    if not summed:
        raise ModelLoadError(
            "its modules come with no plan for members of a stage",
            got=f"a base_model_tp_plan of {len(plan)} entries, none of which is rowwise",
            expected="tensor_parallel_size = 1",
        )
    return ModuleParts(cuts, frozenset(summed))


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name + ".")[:-1]


def _cuts_of_experts(model: Any, name: str, module: nn.Module, plan: Mapping[str, str]) -> dict[str, Cut]:
    parameters = {each for each, parameter in module._parameters.items() if parameter is not None}
    styles = {each: plan.get(_pattern(f"{name}.{each}")) for each in sorted(parameters)}
    expected = {"down_proj": "rowwise", "gate_up_proj": "packed_colwise"}
    if styles != expected or getattr(module, "is_transposed", False) or not model._can_set_experts_implementation():
        raise ModelLoadError(
            "experts lie otherwise than members of a stage can cut them",
            got=", ".join(f"{each}: {style}" for each, style in styles.items()) or type(module).__name__,
            expected=f"experts with outputs before inputs, {', '.join(f'{k}: {v}' for k, v in expected.items())}",
        )
    return {f"{name}.gate_up_proj": Cut(1, 2), f"{name}.down_proj": Cut(2)}


def cut_model(model: Any, parts: ModuleParts, count: int) -> None:
    """Make the parameters of a model on the meta device those of one of `count` members, which are alike.

    Raises:
        ModelLoadError: a size does not divide.
    """
    for name, cut in parts.cuts.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = getattr(module, last)
        if parameter.shape[cut.dim] * cut.num_sharing % (cut.num_packed * count):
            raise ModelLoadError(
                "a weight cannot be cut into parts of equal size",
                got=f"{name} of {list(parameter.shape)}, {count} members of a stage",
                expected=f"a number of members that divides {parameter.shape[cut.dim] // cut.num_packed}",
            )
        part = cut.of(parameter.data, Member(0, count))
        setattr(module, last, nn.Parameter(part, requires_grad=False))
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape


def cut_vocabulary(model: Any, part: VocabularyPart) -> frozenset[str]:
    """Make embedding and LM head of a model on the meta device those of a member; return the parameters' names."""
    modules = {model.get_input_embeddings(), model.get_output_embeddings()}
    names = {name for name, module in model.named_modules() if module in modules}
    found = set[str]()
    for module in modules:
        for last, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, last, nn.Parameter(parameter.data.new_empty(part.size, *parameter.shape[1:]), False))
                found |= {f"{name}.{last}" for name in names if model.get_submodule(name) is module}
    return frozenset(found)


def read_parts(
    slices: dict[str, Any], parts: ModuleParts, of_vocabulary: Collection[str], part: VocabularyPart, mapping: list[Any]
) -> dict[str, Any]:
    """Return a checkpoint's tensors, of those that are cut the member's part.

    Args:
        slices: By name.
        parts: Of the model.
        of_vocabulary: Parameters with a row per token.
        part: The member's, of the vocabulary.
        mapping: How transformers renames and joins tensors of a checkpoint.
    """
    from transformers.core_model_loading import WeightConverter, rename_source_key

    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
    member, found = Member(part.members.rank, part.members.count), dict[str, Any]()
    for name, tensor in slices.items():
        target, joined = rename_source_key(name, renamings, converters)
        cut = parts.cuts.get(target)
        if cut is not None and joined is not None:  # one of the weights that become one, of one expert
            cut = Cut(cut.dim - 3)
        if cut is not None:
            found[name] = SlicedTensor(tensor, partial(cut.of, member=member))
        else:
            found[name] = SlicedTensor(tensor, part.rows_of) if target in of_vocabulary else tensor
    return found
