"""Layers of transformers by the kernel set: attention always, the rest where a layer uses it as the kernel set does.

    linear layers   by the kernel set's products; those that read the same tensor become one
    norms           RMSNorm with a weight w, or 1 + w
    heads           norm and rotation of queries and keys, by the attention's kernel, which then reads one tensor
    experts         by the kernel set's, where they are down(silu(gate) * up), or gpt-oss's

Weights of few bits are held as the checkpoint has them where one of these products takes them.

Nothing of that goes by names. Norms, rotations and experts are tried with random numbers, in float32. What becomes of a
linear layer's output is seen in a step of a few tokens: where each tensor begins says what it was made of.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from raypp.models.attention_config import AttentionConfig
from raypp.ops.attention import AttentionBatch, HeadNorm, Heads, Rotation
from raypp.ops.backend import SILU, Attention, ExpertWeights, Gate, KernelSet, Projection
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_state import LayerMemory, ModulesMemory
from raypp.ops.weight import Weight, stacked_weights

_LOG = logging.getLogger(__name__)
ATTENTION = EXPERTS = "raypp"
_PLACE = "raypp_attention"
_ROTATION = "apply_rotary_pos_emb"
Held = dict[tuple[nn.Module, str], Weight]
_PRODUCTS, _SUM = "raypp_products", "raypp_sum"
Sum = Callable[[torch.Tensor], torch.Tensor]
"""Of a tensor over the members of a stage, [T, H]."""
_OF_EXPERTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
NUM_TRIED_TOKENS = 11
_OF_MODELS = {"transformers", "transformers_modules"}
"""Folders of transformers' models, and of those whose code comes with their checkpoint."""
_EPS = ("variance_epsilon", "eps")
_TOLERANCE = 1e-5


def _attend(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Any, None]:
    """Attend as whatever stands at `module`; see transformers' attention interface."""
    options.setdefault("is_causal", getattr(module, "is_causal", True))
    options["module"] = module
    return getattr(module, _PLACE)(query, key, value, attention_mask, options), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def attend_at(layer: nn.Module, attention: object) -> None:
    """Have all attention of a layer go to `attention`, a callable as `LayerAttention` is."""
    for module in layer.modules():
        setattr(module, _PLACE, attention)


class Step:
    """What attention reads of the step that runs."""

    batch: AttentionBatch
    caches: Sequence[LayerMemory]
    positions: torch.Tensor
    rotations: dict[int, tuple[object, Rotation]]
    """For the kernels, by the identity of what they were made of: transformers' cosines, or frequencies of 0."""

    def begin(self, positions: torch.Tensor, batch: AttentionBatch, caches: Sequence[LayerMemory]) -> None:
        """Set it for all layers. Shapes: positions [T] int64."""
        self.positions, self.batch, self.caches, self.rotations = positions, batch, caches, {}

    def rotation(self, source: object, make: Callable[[], Rotation]) -> Rotation:
        """Return the rotation made of `source`, once per step."""
        made = self.rotations.get(id(source))
        if made is None:
            made = self.rotations[id(source)] = (source, make())
        return made[1]


@dataclass(eq=False)
class _Seen:
    """What a layer has done since the one before it attended. Tensors are kept, so that no two begin at one place."""

    linears: list[tuple[_Linear, torch.Tensor, int]] = field(default_factory=list)
    """Output, and its version then."""
    norms: list[tuple[_Norm, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Input and output."""
    rotated: tuple[torch.Tensor, ...] = ()
    """Queries and keys before, and after."""


@dataclass(eq=False)
class _Trial:
    """Steps that show what layers do. Attention is no attention then."""

    seen: _Seen | None = None
    """While what layers do to queries and keys is watched, and no product is computed."""
    has_kernels: bool = False
    """Whether all kernels are made. They share memory whose size is known only then."""
    heads_by_kernels: bool = True
    """Whether the kernel set would do what it can of queries and keys."""


class _Now(local):
    """Of the thread that runs a model: others may run other members of its stage."""

    trial: _Trial | None = None
    rotating: LayerAttention | None = None
    """The attention that rotates the queries and keys that the layer would rotate next."""


_now = _Now()


def is_tried() -> bool:
    """Return whether a step runs that shows what layers do: it is of no rows."""
    return _now.trial is not None


class LayerAttention:
    """The attention of one layer: transformers' queries, keys and values to the kernel set's.

    Args:
        step: Of the stage.
        place: Of the layer among the stage's.
        config: How the layer attends.
        group: Of its KV blocks.
        kernels: Of the device.
    """

    def __init__(self, step: Step, place: int, config: AttentionConfig, group: int, kernels: KernelSet) -> None:
        self._step = step
        self._place = place
        self._config = config
        self._group = group
        self._kernels = kernels
        self._attention: Attention | None = None
        self._source: _Linear | None = None
        self._rotates = False
        self._qkv: torch.Tensor | None = None  # the linear layers' output, where the kernels do all that follows
        self.rotation: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosines and sines that the kernels are to rotate by."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, options: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return [1, T, Hq, Dv]. Shapes: query [1, Hq, T, Dk], key [1, Hk, T, Dk], value [1, Hk, T, Dv]."""
        step, config, num_tokens = self._step, self._config, query.shape[2]
        qkv, rotation, self._qkv, self.rotation, _now.rotating = self._qkv, self.rotation, None, None, None
        if _now.trial is not None:
            if _now.trial.seen is not None:
                self._make(_now.trial.seen, query, key, value, options.get("s_aux"))
                _now.trial.seen = _Seen()
            attended = value.new_ones(1, num_tokens, config.num_heads, config.v_dim)
            return attended if self._source is not None else attended + (query.mean() + key.mean() + value.mean())
        assert self._attention is not None
        if qkv is None:
            qkv = torch.cat([each[0].transpose(0, 1).flatten(1) for each in (query, key, value)], -1)
        out = None if step.batch.padded_out is None else step.batch.padded_out[config.output_size]
        rope = step.rotation(self._unrotated if rotation is None else rotation[0], partial(self._rope, rotation))
        memory = step.caches[self._place]
        cache = memory.cache if isinstance(memory, ModulesMemory) else memory
        assert isinstance(cache, LayerCache)
        attended = self._attention(qkv, rope, cache, step.batch, out)
        return attended.view(1, num_tokens, config.num_heads, config.v_dim)

    def leave_heads(self) -> None:
        """Have the layer do itself what was found that the kernels could do."""
        if self._source is not None:
            self._source.attention, self._source = None, None
            self._attention = self._kernels.attention(replace(self._heads, norm=None))

    @property
    def has_heads(self) -> bool:
        """Whether the kernels now do what the layer would do to queries and keys."""
        return self._source is not None and (_now.trial is None or _now.trial.heads_by_kernels)

    def take(self, qkv: torch.Tensor) -> None:
        """Attend to `qkv`, [T, (Hq + Hk) * Dk + Hk * Dv], and rotate it if the layer would."""
        self._qkv = qkv
        _now.rotating = self if self._rotates else None

    def _rope(self, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> Rotation:
        if rotation is None:
            return self._kernels.rotation(self._step.positions, self._unrotated)
        half = self._config.head_dim // 2
        cos, sin = (each.reshape(-1, each.shape[-1])[:, :half] for each in rotation)
        return self._kernels.rotation_of(cos, sin)

    def _make(self, seen: _Seen, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
        """Make the layer's operation, with all that it can do of what the layer did to queries and keys."""
        config = self._config
        rotates = bool(seen.rotated) and _begin_alike(seen.rotated[2:], (q, k))
        if rotates:
            q, k = seen.rotated[:2]
        normed = [next((each for each in seen.norms if _begin_alike(each[2:], (x,))), None) for x in (q, k)]
        norm: HeadNorm | None = None
        if normed[0] is not None and normed[1] is not None:
            (q_norm, q, _), (k_norm, k, _) = normed[0], normed[1]
            if q_norm.eps == k_norm.eps and q_norm.gain.shape == k_norm.gain.shape == (config.head_dim,):
                norm = HeadNorm(q_norm.gain, k_norm.gain, q_norm.eps)
        source = next((linear for linear in seen.linears if _begin_alike(linear[1:2], (q,))), None)
        is_whole = normed == [None, None] or norm is not None
        if source is not None and is_whole and _are_parts(source, (q, k, v), config):
            self._rotates, self._source = rotates, source[0]
            source[0].attention = self
            for each in normed:
                if each is not None:
                    each[0].attention = self
        else:
            norm = None
        self._heads = Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            norm,
            v_dim=config.v_dim,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            window=config.window,
            soft_cap=config.soft_cap,
            sinks=None if sinks is None else sinks.float(),
            group=self._group,
            sees_ahead=config.window is not None,  # Gemma 4's tokens of images, where they see later ones at all
        )
        self._attention = self._kernels.attention(self._heads)
        self._unrotated = torch.zeros(config.head_dim // 2, device=v.device)


def _begin_alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(one.data_ptr() == other.data_ptr() for one, other in zip(some, others, strict=True))


def _are_parts(
    source: tuple[_Linear, torch.Tensor, int], parts: Sequence[torch.Tensor], config: AttentionConfig
) -> bool:
    """Return whether queries, keys and values are what a linear layer's output has, one after the other, unchanged.

    Shapes: parts [1, H, T, D] or [1, T, H, D].
    """
    _, output, version = source
    width, place, num_kv_heads = output.shape[-1], output.data_ptr(), config.num_kv_heads
    sizes = ((config.num_heads, config.head_dim), (num_kv_heads, config.head_dim), (num_kv_heads, config.v_dim))
    if width != sum(heads * size for heads, size in sizes) or output._version != version:
        return False
    for part, (heads, size) in zip(parts, sizes, strict=True):
        strides = {(part.shape[dim], part.stride(dim)) for dim in (1, 2)}
        expected = {(NUM_TRIED_TOKENS, width), (heads, size)}
        if part.data_ptr() != place or part.shape[3] != size or part.stride(3) != 1 or strides != expected:
            return False
        place += heads * size * output.element_size()
    return True


class _Linear(nn.Module):
    """One or several linear layers of the same input: [..., K] to their outputs side by side, [..., N]."""

    def __init__(
        self, linears: Sequence[nn.Linear], weights: Sequence[Weight], kernels: KernelSet, sum_: Sum | None
    ) -> None:
        super().__init__()
        self._sum = sum_
        weight, biases = stacked_weights(weights), [linear.bias for linear in linears]
        bias: torch.Tensor | None = None if biases[0] is None else torch.cat([each.detach() for each in biases])
        shape = weight.num_outputs, weight.num_inputs
        self.weight = torch.empty(shape, dtype=linears[0].weight.dtype, device="meta")  # what a model asks for its type
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)
        self.attention: LayerAttention | None = None
        self._num_outputs = weight.num_outputs
        self._project: Projection = kernels.linear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _now.trial is not None and not _now.trial.has_kernels:
            y = x.new_zeros(*x.shape[:-1], self._num_outputs)
            if _now.trial.seen is not None:
                _now.trial.seen.linears.append((self, y, y._version))
            return y
        y = self._project(x.reshape(-1, x.shape[-1]).contiguous())
        if self._sum is not None and _now.trial is None:  # members have not met before the first step
            y = self._sum(y)
        if self.attention is not None and self.attention.has_heads:
            self.attention.take(y)
        return y.view(*x.shape[:-1], -1)


class _First(nn.Module):
    """The first of several linear layers: computes all of them. The others are `_Other`s."""

    def __init__(self, joined: _Linear, size: int) -> None:
        super().__init__()
        self.joined = joined
        self.weight = joined.weight[:size]
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self._size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input, self.output = x, self.joined(x)
        return self.output[..., : self._size]


class _Other(nn.Module):
    """A part of what the first linear layer of the same input computed."""

    def __init__(self, first: _First, begin: int, end: int, *, is_last: bool) -> None:
        super().__init__()
        self._first = (first,)  # no module of this one
        self.weight = first.joined.weight[begin:end]
        self._begin, self._end = begin, end
        self._is_last = is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (first,) = self._first
        output = first.output if first.input is x and first.output is not None else first.joined(x)
        if self._is_last:
            first.input = first.output = None
        return output[..., self._begin : self._end]


class _Norm(nn.Module):
    """RMSNorm by the kernel set; nothing where it is part of the attention."""

    def __init__(self, weight: nn.Parameter, gain: torch.Tensor, eps: float, kernels: KernelSet) -> None:
        super().__init__()
        self.weight = weight
        self.gain = gain
        self.eps = eps
        self.attention: LayerAttention | None = None
        self._norm = kernels.norm(gain, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None and self.attention.has_heads:
            return x
        y = self._norm(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)
        if _now.trial is not None and _now.trial.seen is not None:
            _now.trial.seen.norms.append((self, x, y))
        return y


class _Experts(nn.Module):
    """The experts of a layer by the kernel set."""

    def __init__(self, weights: ExpertWeights, kernels: KernelSet) -> None:
        super().__init__()
        self.num_bytes = weights.num_bytes
        self._products = kernels.chosen_experts(weights)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._products(x, experts, weights)
        return y


def _experts(module: nn.Module, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the experts of `module`; see transformers' interface of experts."""
    if _now.trial is not None and not _now.trial.has_kernels:
        return torch.zeros_like(x)
    own = module._modules.get(_PRODUCTS)
    y: torch.Tensor = (
        partial(grouped_mm_experts_forward, module)(x, experts, weights) if own is None else own(x, experts, weights)
    )
    sum_: Sum | None = getattr(module, _SUM, None)
    return y if sum_ is None or _now.trial is not None else sum_(y)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def use_kernels(
    model: nn.Module,
    layers: Sequence[nn.Module],
    attentions: Sequence[LayerAttention],
    kernels: KernelSet,
    run: Callable[[], torch.Tensor],
    held: Held,
    summed: Collection[nn.Module],
) -> str | None:
    """Give the kernel set all that it can do of a stage's layers, which have their weights and attend by it.

    Returns what waits for the device then, as a line of a program; None: nothing, or there is none to wait for.

    Args:
        model: All of transformers' modules that the stage runs.
        layers: Of the stage.
        attentions: Theirs.
        kernels: Of the device.
        run: Runs the layers with `NUM_TRIED_TOKENS` tokens.
        held: Weights that are not in 16 or 32 bits, by module and parameter; each is taken out when it is used.
        summed: Linear layers and experts of whose inputs this member of the stage has a part: the kernel set sums.
    """
    inputs: dict[nn.Module, tuple[int, int, torch.Tensor]] = {}
    sums = dict.fromkeys(summed, kernels.summed)

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args:
            inputs[module] = (id(args[0]), args[0]._version, args[0])

    linears = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_pre_hook(note) for module in linears]
    for source in {sys.modules[type(module).__module__] for layer in layers for module in layer.modules()}:
        _watch_rotation(source)
    for module in set(summed) - set(linears):
        setattr(module, _SUM, kernels.summed)
    offsets: dict[tuple[type[nn.Module], float], float | None] = {}
    forms: dict[type[nn.Module], _ExpertForm | None] = {}
    try:
        _now.trial = _Trial()
        with torch.no_grad():
            run()
            for hook in hooks:
                hook.remove()
            for parent in list(model.modules()):
                _replace_norms(parent, offsets, kernels)
                _replace_linears(parent, inputs, held, kernels, sums)
                _replace_experts(parent, forms, held, kernels)
            inputs.clear()
            for module, name in list(held):  # of a kind of its own, or never called
                _put_dense(module, name, held.pop((module, name)))
            _now.trial.seen = _Seen()
            run()
            _now.trial = _Trial(has_kernels=True, heads_by_kernels=False)
            expected = run()
            _now.trial.heads_by_kernels = True
            if not torch.equal(run().view(torch.uint8), expected.view(torch.uint8)):
                _LOG.info("queries, keys or values do not go to attention alone: layers norm and rotate them")
                for attention in attentions:
                    attention.leave_heads()
            return _wait_of(run) if expected.is_cuda else None
    finally:
        _now.trial = None


def _wait_of(run: Callable[[], torch.Tensor]) -> str | None:
    """Return the line of transformers that makes the host wait for the GPU; None if there is none."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        lines = traceback.extract_tb(error.__traceback__)
        line = next((line for line in reversed(lines) if _OF_MODELS & set(Path(line.filename).parts)), lines[-1])
        return f"{Path(line.filename).name}:{line.lineno}: {line.line}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _replace_norms(
    parent: nn.Module, offsets: dict[tuple[type[nn.Module], float], float | None], kernels: KernelSet
) -> None:
    for name, module in parent.named_children():
        parameters = dict(module.named_parameters())
        weight = parameters.get("weight")
        eps = next((value for each in _EPS if isinstance(value := getattr(module, each, None), float)), None)
        if eps is None or weight is None or weight.ndim != 1 or len(parameters) > 1 or any(module.children()):
            continue
        if len(inspect.signature(module.forward).parameters) > 1:  # of a gate, too
            continue
        kind = (type(module), eps)
        if kind not in offsets:
            offsets[kind] = _offset_of(module, eps)
        if (offset := offsets[kind]) is not None:
            gain = weight.detach() if not offset else weight.detach().float() + offset
            parent._modules[name] = _Norm(weight, gain, eps, kernels)


def _offset_of(module: nn.Module, eps: float) -> float | None:
    """Return what a norm adds to its weight; None if it is another norm than RMSNorm."""
    tried, given = copy.copy(module), module.get_parameter("weight")
    weight = torch.randn(given.shape, device=given.device)
    tried._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = torch.randn(3, len(weight), device=weight.device) * torch.tensor([[eps**0.5], [1.0], [20.0]]).to(weight.device)
    try:
        found = tried(x.unsqueeze(0))
    except Exception:  # it takes something else
        return None
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if isinstance(found, torch.Tensor) and torch.allclose(found[0], normed * (weight + offset), 1e-4, 1e-5):
            return offset
    return None


def _replace_linears(
    parent: nn.Module,
    inputs: Mapping[nn.Module, tuple[int, int, torch.Tensor]],
    held: Held,
    kernels: KernelSet,
    sums: Mapping[nn.Module, Sum],
) -> None:
    """Replace the linear layers of a module; those of the same input, in the order of their calls, by one."""
    names = {module: name for name, module in parent.named_children()}
    groups: dict[tuple[object, ...], list[nn.Linear]] = {}
    for module, (place, version, _) in inputs.items():
        if isinstance(module, nn.Linear) and module in names:
            key = (place, version, module.weight.shape[1], module.weight.dtype, module.bias is None, module in sums)
            groups.setdefault((*key, *_form(held.get((module, "weight")))), []).append(module)
    for linears in groups.values():
        weights = [_taken(held, linear) for linear in linears]
        joined = _Linear(linears, weights, kernels, sums.get(linears[0]))
        if len(linears) == 1:
            parent._modules[names[linears[0]]] = joined
            continue
        first, begin = _First(joined, linears[0].out_features), linears[0].out_features
        parent._modules[names[linears[0]]] = first
        for linear in linears[1:]:
            end = begin + linear.out_features
            parent._modules[names[linear]] = _Other(first, begin, end, is_last=linear is linears[-1])
            begin = end


def _taken(held: Held, linear: nn.Linear) -> Weight:
    """Return the weight of a linear layer, which nothing else has then."""
    place = (linear, "weight")
    return held.pop(place) if place in held else Weight(linear.weight.detach())


def _form(weight: Weight | None) -> tuple[object, ...]:
    """Return what weights that become one product have in common."""
    if weight is None:
        return ()
    return (*weight.form, weight.block, None if weight.order is None else tuple(weight.order.tolist()))


def _put_dense(module: nn.Module, name: str, weight: Weight) -> None:
    """Give a module a weight in its own type."""
    dense = weight.dequantized(getattr(module, name).dtype)
    if dense.ndim == 3 and getattr(module, "is_transposed", False):  # inputs before outputs
        dense = dense.transpose(-2, -1).contiguous()
    setattr(module, name, nn.Parameter(dense, requires_grad=False))


class _ExpertForm(NamedTuple):
    """What the experts of a class of modules compute, and how their weights lie."""

    gate: Gate
    is_interleaved: bool  # outputs of gate and up take turns
    is_transposed: bool  # inputs come before outputs

    def weight(self, stored: torch.Tensor | Weight, *, is_gated: bool) -> Weight:
        """Return a weight as the kernel set takes it; of few bits it has outputs before inputs already."""
        if isinstance(stored, torch.Tensor):
            stored = Weight(stored.transpose(1, 2).contiguous() if self.is_transposed else stored)
        return stored.mapped(self._gate_first) if is_gated and self.is_interleaved else stored

    def bias(self, bias: torch.Tensor | None, *, is_gated: bool) -> torch.Tensor | None:
        """Return a bias the same way."""
        return self._gate_first(bias) if bias is not None and is_gated and self.is_interleaved else bias

    def _gate_first(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat((part[:, ::2], part[:, 1::2]), 1)


def _replace_experts(
    module: nn.Module, forms: dict[type[nn.Module], _ExpertForm | None], held: Held, kernels: KernelSet
) -> None:
    parameters = {name: parameter.detach() for name, parameter in module._parameters.items() if parameter is not None}
    gate_up, down, bias, down_bias = (parameters.get(name) for name in _OF_EXPERTS)
    if gate_up is None or down is None or gate_up.ndim != 3 or parameters.keys() - set(_OF_EXPERTS):
        return
    if type(module) not in forms:
        forms[type(module)] = _form_of_experts(module, len(down), has_bias=bias is not None)
    form = forms[type(module)]
    if form is None:
        return
    weights = ExpertWeights(
        form.weight(held.pop((module, _OF_EXPERTS[0]), gate_up), is_gated=True),
        form.weight(held.pop((module, _OF_EXPERTS[1]), down), is_gated=False),
        form.bias(bias, is_gated=True),
        form.bias(down_bias, is_gated=False),
        form.gate,
    )
    module.add_module(_PRODUCTS, _Experts(weights, kernels))
    module._parameters.clear()


def _form_of_experts(module: nn.Module, num_experts: int, *, has_bias: bool) -> _ExpertForm | None:
    """Return which known form gives what a module's experts compute of small random weights; None: none does."""
    hidden, inner, tried = 8, 16, copy.copy(module)
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    tensors = [torch.randn(shape) for shape in shapes] + [torch.randn(shape[:2]) for shape in shapes if has_bias]
    is_transposed = bool(getattr(module, "is_transposed", False))
    stored = [each.transpose(1, 2) if is_transposed and each.ndim == 3 else each for each in tensors]
    tried._parameters = {
        name: nn.Parameter(each, requires_grad=False) for name, each in zip(_OF_EXPERTS, stored, strict=False)
    }
    x = 6 * torch.randn(4, hidden)  # large enough for limits to show
    experts, weights = torch.randn(4, num_experts).topk(min(2, num_experts)).indices, torch.rand(4, min(2, num_experts))
    try:
        found = grouped_mm_experts_forward(tried, x, experts, weights)
    except Exception:  # it needs something else
        return None
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    gates = [SILU, *([Gate(alpha, limit, 1.0)] if isinstance(alpha, float) and isinstance(limit, float) else [])]
    for form in (_ExpertForm(gate, pairs, is_transposed) for gate in gates for pairs in (False, True)):
        gate_up, down = (form.weight(each, is_gated=not i).data for i, each in enumerate(stored[:2]))
        bias, down_bias = (form.bias(each, is_gated=not i) for i, each in enumerate((*stored[2:], None, None)[:2]))
        between = torch.einsum("th,tkoh->tko", x, gate_up[experts]) + (0 if bias is None else bias[experts])
        between = form.gate(*between.chunk(2, -1))
        y = torch.einsum("tki,tkhi->tkh", between, down[experts]) + (0 if down_bias is None else down_bias[experts])
        expected = (y * weights.unsqueeze(2)).sum(1)
        if torch.allclose(found, expected, 1e-3, 1e-3 * float(expected.abs().max())):
            return form
    return None


_WATCHED: set[Callable[..., Any]] = set()


def _watch_rotation(source: Any) -> None:
    """Have a module's function that rotates queries and keys leave that to the attention that asks for it.

    Gemma 4's, which rotates one of them at a time, is left alone.
    """
    rotate = getattr(source, _ROTATION, None)
    if rotate is None or rotate in _WATCHED or "k" not in inspect.signature(rotate).parameters:
        return

    @wraps(rotate)
    def watched(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if _now.rotating is not None:
            _now.rotating.rotation = cos, sin
            return q, k
        rotated = rotate(q, k, cos, sin, *args, **kwargs)
        seen = None if _now.trial is None else _now.trial.seen
        if seen is not None and _rotates_halves(rotate, q.shape, cos, sin, *args, **kwargs):
            seen.rotated = (q, k, *rotated)
        return rotated

    _WATCHED.add(watched)
    setattr(source, _ROTATION, watched)


def _rotates_halves(
    rotate: Callable[..., Any], shape: torch.Size, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Return whether a function rotates pairs of elements i and i + D / 2 of heads by the first D / 2 cosines."""
    half = shape[-1] // 2
    if (
        cos.shape != sin.shape
        or cos.shape[-1] not in (half, 2 * half)
        or cos.numel() != NUM_TRIED_TOKENS * cos.shape[-1]
    ):
        return False
    x = torch.randn(shape, device=cos.device)
    angles = torch.randn_like(cos[..., :half], dtype=torch.float32)
    copies = cos.shape[-1] // half
    found = rotate(x, x, *(torch.cat([each] * copies, -1) for each in (angles.cos(), angles.sin())), *args, **kwargs)
    tokens_dim = [dim for dim in (1, 2) if shape[dim] == NUM_TRIED_TOKENS]
    if len(tokens_dim) != 1:
        return False
    angles = angles.reshape(NUM_TRIED_TOKENS, half)
    if tokens_dim == [1]:
        angles = angles.unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    expected = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    return all(torch.allclose(each, expected, _TOLERANCE, _TOLERANCE) for each in found)


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that the kernel set's products have of a model."""
    return sum(each.num_bytes for each in model.modules() if isinstance(each, (_Linear, _Experts)))
