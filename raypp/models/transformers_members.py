"""The part of transformers' modules that a member of a stage has, by the plan that they come with or by what they are.

    outputs     rows of a linear layer's weight: heads, or dimensions of an MLP
    inputs      columns: what the linear layer gives is summed over the members
    experts     outputs of their first weight and inputs of the second: what they give is summed
    all others  whole on each member

The plan is `base_model_tp_plan` of transformers' configurations. Where it cuts nothing of a module, or there is none:

    attention   projections of queries, keys, values, a gate, and of the output; all else in it is alike for each head
    MLP         linear layers of known names, with nothing of the same width between them
    experts     tried with random numbers: halves of the weights have to give halves of a sum
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward

from raypp.errors import ModelLoadError
from raypp.models.member_sizes import Member, Size, Span
from raypp.models.weight_formats import QuantizedTensor
from raypp.ops.sample.vocabulary_part import VocabularyPart

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OF_KV = ("k_proj", "v_proj")
_JOINED = "qkv_proj"
_GATES = ("gate_proj", "g_proj")
"""Of what attention gives, for each of its elements."""
_OUTPUTS = ("o_proj", "out_proj")
_OUT_OF_LATENTS = "kv_b_proj"
_OF_LATENTS = ("q_a_", "kv_a_")
"""What names begin with that are alike for all heads."""
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("fc1", "fc2"),
)
"""Linear layers of an MLP, the last behind the others. One that is twice as wide has gate and up."""
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""What modules and their configurations call a number of heads."""
EXPERT_BIAS = "down_proj_bias"
"""Of experts' outputs: added once."""


@dataclass(frozen=True)
class Piece:
    """One of several tensors that lie one after the other in a dimension.

    Args:
        size: Of the dimension.
        num_kv_heads: In it, which members that are more share; 0: it is of something else.
    """

    size: int
    num_kv_heads: int = 0

    def part(self, member: Member) -> Span:
        """Return the member's."""
        num_sharing = max(1, member.count // self.num_kv_heads) if self.num_kv_heads else 1
        return member.part(self.size * num_sharing // member.count, num_sharing)


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut.

    Args:
        dim: The dimension, from behind.
        pieces: Each of which is cut.
        is_of_inputs: Whether it is the inputs of a product that are cut.
        name: Of the parameter, for errors.
    """

    dim: int
    pieces: tuple[Piece, ...]
    is_of_inputs: bool = False
    name: str = ""

    @property
    def size(self) -> int:
        """Of the whole dimension."""
        return sum(piece.size for piece in self.pieces)

    def spans(self, size: int, member: Member) -> list[Span]:
        """Return the member's parts of a dimension: that of the parameter, or of one of the pieces.

        Raises:
            ModelLoadError: it is neither.
        """
        pieces = self.pieces if size == self.size else [each for each in self.pieces if each.size == size][:1]
        if not pieces:
            raise ModelLoadError(
                f"{self.name} has the wrong shape in the checkpoint",
                got=f"{size} elements in the dimension that the members of a stage divide",
                expected=f"{self.size}, by config.json",
            )
        spans, begin = list[Span](), 0
        for piece in pieces:
            part = piece.part(member)
            spans.append(Span(begin + part.start, part.size, size))
            begin += piece.size
        return spans

    def of(self, tensor: Any, member: Member) -> torch.Tensor:
        """Return the member's part of a tensor, or of a slice of a file, of which no more is read."""
        shape = list(tensor.get_shape()) if hasattr(tensor, "get_shape") else list(tensor.shape)
        before = (slice(None),) * (len(shape) + self.dim)
        parts = [tensor[(*before, span.slice)] for span in self.spans(shape[self.dim], member)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def blocks(self, num_outputs: int, num_inputs: int, member: Member) -> list[tuple[Size, Size]]:
        """Return the same of a product's weight: the outputs and inputs of parts that lie one below the other."""
        if self.is_of_inputs:
            return [(num_outputs, span) for span in self.spans(num_inputs, member)]
        return [(span, num_inputs) for span in self.spans(num_outputs, member)]


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

    cuts: dict[str, Cut] = field(default_factory=dict)
    """By names of parameters."""
    summed: set[str] = field(default_factory=set)
    """Names of modules: linear layers, and those of all experts."""
    divided: set[str] = field(default_factory=set)
    """Names of modules that are asked for their number of heads."""

    def sides(self, weight: str) -> tuple[bool, bool]:
        """Return whether a member has some of the outputs of a product, and whether it has some of the inputs."""
        cut = self.cuts.get(weight)
        return (False, False) if cut is None else (not cut.is_of_inputs, cut.is_of_inputs)

    def inputs_of(self, summed: str) -> int:
        """Return how many inputs a linear layer or experts have together, of whose outputs members make a sum."""
        return next(cut.size for each in ("weight", "down_proj") if (cut := self.cuts.get(f"{summed}.{each}")))

    def shares_kv_heads(self, attention: str) -> bool:
        """Return whether members that are more than an attention's KV heads share them."""
        cuts = [cut for name, cut in self.cuts.items() if name.startswith(f"{attention}.")]
        return any(piece.num_kv_heads for cut in cuts for piece in cut.pieces)

    def add(self, name: str, cut: Cut) -> None:
        """Cut a parameter."""
        self.cuts[name] = replace(cut, name=name)

    def cut_linear(self, name: str, linear: nn.Linear, *pieces: Piece) -> None:
        """Cut a linear layer's outputs; without pieces its inputs."""
        if not pieces:
            self.add(f"{name}.weight", Cut(-1, (Piece(linear.in_features),), is_of_inputs=True))
            self.summed.add(name)
            return
        self.add(f"{name}.weight", Cut(-2, pieces))
        if linear.bias is not None:
            self.add(f"{name}.bias", Cut(-1, pieces))


def parts_of(model: Any, layers: Iterable[nn.Module]) -> ModuleParts:
    """Return what is cut of the layers of transformers' model; nothing, where nothing is known of them."""
    plan, parts, known = model.tp_plan or {}, ModuleParts(), dict[type[nn.Module], int]()
    names = {module: name for name, module in model.named_modules()}
    for layer in layers:
        for module in layer.modules():
            linears = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
            num_there = len(parts.cuts)
            for last, linear in linears.items():
                name = f"{names[module]}.{last}"
                _cut_as_planned(parts, name, linear, plan.get(_NUMBER.sub("*", name)), module, model.config)
            for last, parameter in module.named_parameters(recurse=False):
                name = f"{names[module]}.{last}"
                if parameter.ndim == 1 and plan.get(_NUMBER.sub("*", name)) == "colwise":  # a number of each head
                    parts.add(name, Cut(-1, (Piece(len(parameter)),)))
            is_one_of_many = bool(re.search(r"\.\d", names[module].removeprefix(names[layer])))
            if len(parts.cuts) == num_there and not is_one_of_many:
                _cut_attention(parts, names[module], module, linears)
                _cut_mlp(parts, names[module], module, linears)
            if model._can_set_experts_implementation():
                _cut_experts(parts, names[module], module, known)
    return parts


def _cut_as_planned(
    parts: ModuleParts, name: str, linear: nn.Linear, style: str | None, parent: nn.Module, config: Any
) -> None:
    size = linear.out_features
    if style == "rowwise":
        parts.cut_linear(name, linear)
    elif style == "packed_colwise":
        parts.cut_linear(name, linear, Piece(size // 2), Piece(size // 2))
    elif style == "colwise" and name.endswith(_OF_KV):
        head_dim = getattr(parent, "head_dim", None)
        of_keys = getattr(parent, "k_proj", linear).out_features
        num_kv_heads = of_keys // head_dim if head_dim else getattr(config, "num_key_value_heads", None) or 0
        parts.cut_linear(name, linear, Piece(size, num_kv_heads))
    elif style == "colwise":
        parts.cut_linear(name, linear, Piece(size))


def _cut_attention(parts: ModuleParts, prefix: str, module: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Cut an attention by heads, if all that it has is known."""
    head_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    last = next((name for name in _OUTPUTS if name in linears), None)
    if not isinstance(head_dim, int) or last is None:
        return
    widths = {name: linear.out_features for name, linear in linears.items() if not name.startswith(_OF_LATENTS)}
    attended = linears[last].in_features
    pieces: dict[str, tuple[Piece, ...]] = {name: (Piece(width),) for name, width in widths.items() if name != last}
    gates = {widths[name] for name in _GATES if name in pieces}
    if _JOINED in pieces:
        of_kv = (widths[_JOINED] - attended) // 2
        pieces[_JOINED] = (Piece(attended), *[Piece(of_kv, of_kv // head_dim)] * 2)
    elif {"q_proj", *_OF_KV} <= pieces.keys():
        pieces |= {name: (Piece(widths[name], widths["k_proj"] // head_dim),) for name in _OF_KV}
    elif _OUT_OF_LATENTS not in pieces:
        return
    known = {*_GATES, *([_JOINED] if _JOINED in pieces else ["q_proj", "q_b_proj", _OUT_OF_LATENTS, *_OF_KV])}
    others = {name: each for name, each in module.named_parameters() if name.rpartition(".")[0] not in linears}
    sinks = others.pop("sinks", None)
    are_of_heads = all(
        name.count(".") == 1 and (each.shape == (head_dim,) or name.startswith(_OF_LATENTS))
        for name, each in others.items()
    )
    if not (pieces.keys() <= known and gates <= {attended} and are_of_heads):
        return
    if sinks is not None:
        parts.add(f"{prefix}.sinks", Cut(-1, (Piece(len(sinks)),)))
    for name, of_linear in pieces.items():
        parts.cut_linear(f"{prefix}.{name}", linears[name], *of_linear)
    parts.cut_linear(f"{prefix}.{last}", linears[last])
    parts.divided.add(prefix)


def _cut_mlp(parts: ModuleParts, prefix: str, module: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Cut an MLP, if nothing between its linear layers sees all of its dimensions."""
    *firsts, last = next((names for names in _MLPS if linears.keys() >= set(names)), (None,))
    if last is None:
        return
    width, widths = linears[last].in_features, {linears[name].out_features for name in firsts}
    others = [each for name, each in linears.items() if name not in (*firsts, last)]
    is_seen = any(width in (each.in_features, each.out_features) for each in others)
    is_seen |= any(
        width in each.shape
        for owner in (module, *module.children())
        if owner not in linears.values()
        for each in owner.parameters(recurse=False)
    )
    num_pieces = 2 if len(firsts) == 1 and widths == {2 * width} else 1
    if is_seen or widths != {num_pieces * width}:
        return
    for name in firsts:
        parts.cut_linear(f"{prefix}.{name}", linears[name], *[Piece(width)] * num_pieces)
    parts.cut_linear(f"{prefix}.{last}", linears[last])


def _cut_experts(parts: ModuleParts, name: str, module: nn.Module, known: dict[type[nn.Module], int]) -> None:
    shapes = {each: tuple(parameter.shape) for each, parameter in module.named_parameters(recurse=False)}
    first = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    there = {first, "down_proj"}
    if not there <= shapes.keys() <= there | {f"{first}_bias", EXPERT_BIAS} or len(shapes[first]) != 3:
        return
    if type(module) not in known:
        known[type(module)] = _num_pieces(
            module, first, len(module.get_parameter(first)), has_bias=shapes.keys() > there
        )
    if num_pieces := known[type(module)]:
        for each, cut in _cuts_of_experts(module, shapes, first, num_pieces).items():
            parts.add(f"{name}.{each}", cut)
        parts.summed.add(name)


def _cuts_of_experts(
    module: nn.Module, shapes: Mapping[str, Sequence[int]], first: str, num_pieces: int
) -> dict[str, Cut]:
    of_outputs, of_inputs = (-1, -2) if getattr(module, "is_transposed", False) else (-2, -1)
    pieces = (Piece(shapes[first][of_outputs] // num_pieces),) * num_pieces
    inputs = (Piece(shapes["down_proj"][of_inputs]),)
    cuts = {first: Cut(of_outputs, pieces), "down_proj": Cut(of_inputs, inputs, is_of_inputs=True)}
    return cuts | ({f"{first}_bias": Cut(-1, pieces)} if f"{first}_bias" in shapes else {})


def _num_pieces(module: nn.Module, first: str, num_experts: int, *, has_bias: bool) -> int:
    """Return of how many pieces the first weight of experts is, each of which is cut; 0: with none the sum is right."""
    hidden, inner = 8, 16
    shapes: dict[str, tuple[int, ...]] = {
        first: (num_experts, inner * (2 if first == "gate_up_proj" else 1), hidden),
        "down_proj": (num_experts, hidden, inner),
    }
    biases = {f"{name}_bias": shape[:2] for name, shape in shapes.items() if has_bias}
    if getattr(module, "is_transposed", False):
        shapes = {name: (shape[0], shape[2], shape[1]) for name, shape in shapes.items()}
    tensors = {name: torch.randn(shape) for name, shape in (shapes | biases).items()}
    x, chosen = torch.randn(6, hidden), torch.randn(6, num_experts).topk(min(2, num_experts))

    def computed(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tried = copy.copy(module)
        tried._parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in given.items()}
        found: torch.Tensor = grouped_mm_experts_forward(tried, x, chosen.indices, chosen.values)
        return found

    for num_pieces in (1, 2):
        cuts = _cuts_of_experts(module, shapes | biases, first, num_pieces)
        try:
            given = [{name: cut.of(tensors[name], Member(rank, 2)) for name, cut in cuts.items()} for rank in range(2)]
            once = {name: tensor for name, tensor in tensors.items() if name not in cuts}
            found = computed(given[0] | once) + computed(given[1] | {n: torch.zeros_like(t) for n, t in once.items()})
            whole = computed(tensors)
        except Exception:  # it needs something else
            return 0
        if torch.allclose(found, whole, 1e-4, 1e-4 * float(whole.abs().max())):
            return num_pieces
    return 0


def cut_model(model: Any, parts: ModuleParts, count: int) -> None:
    """Make the parameters of a model on the meta device those of one of `count` members, which are alike."""
    for name, cut in parts.cuts.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        part = cut.of(getattr(module, last).data, Member(0, count))
        setattr(module, last, nn.Parameter(part, requires_grad=False))
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
    for name in parts.divided:
        module = model.get_submodule(name)
        module.config = copy.copy(getattr(module, "config", None))
        for owner in (module, module.config):
            said = {each: value for each in _HEADS if isinstance(value := getattr(owner, each, None), int)}
            for each, value in said.items():
                setattr(owner, each, max(1, value // count))


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
        target, _ = rename_source_key(name, renamings, converters)
        cut = parts.cuts.get(target)
        if cut is not None and hasattr(tensor, "get_shape"):
            cut.spans(tensor.get_shape()[cut.dim], member)  # before others are read
        if cut is not None and isinstance(tensor, QuantizedTensor):
            found[name] = tensor.of(partial(cut.blocks, member=member))
        elif cut is not None:
            found[name] = SlicedTensor(tensor, partial(cut.of, member=member))
        else:
            found[name] = SlicedTensor(tensor, part.rows_of) if target in of_vocabulary else tensor
    return found
