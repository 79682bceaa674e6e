"""Modules of transformers that keep a state of a row: mamba, delta nets, short convolutions.

Such a module reads and writes a layer of transformers' cache: the inputs of its convolution, its recurrent state. It
runs as it is, for rows with as many tokens since their checkpoints together, with a cache of its own for each run:

    checkpoint of the row ---> module over inputs up to where the checkpoint will stand ---> new checkpoint
                                 module over the inputs behind it, the step's last ---> outputs of the step

Inputs of tokens before the step come from a ring, by position; see `raypp.ops.row_state`. So a position that is
computed again overwrites its own input, and nothing else.

Which modules these are, and what they keep, `states_of` finds: it runs the model with a cache on the meta device.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from raypp.errors import ModelLoadError
from raypp.models.transformers_layers import Step, is_tried
from raypp.ops.attention import AttentionBatch
from raypp.ops.row_state import ModuleMemory, ModulesMemory
from raypp.ops.state_sizes import ModuleState, StateTensor

CACHES = ("cache_params", "past_key_values")
_CONV, _RECURRENT = "conv_states", "recurrent_states"
"""Fields of a layer of transformers' cache."""
_NUM_TOKENS = 3
_MOST_TOKENS = 1024
"""Of a run for several rows: without fused kernels a scan takes megabytes for each token."""
_CHUNK, _LEAST_CHUNK = "chunk_size", 16
"""A field of mamba2: to how many tokens its scan pads. Outputs are the same with any."""


class RowGroup(NamedTuple):
    """Rows that a module computes together: as many tokens before the step, in it, and up to the next checkpoint."""

    rows: torch.Tensor  # [B] int64, of the tables
    tokens: torch.Tensor  # [B, n] int64, of the step
    before: torch.Tensor  # [B, m] int64, entries of the ring: the tokens from the checkpoint on
    written: torch.Tensor  # [B, w] int64, entries for the last w tokens of the step
    num_first: int  # of the m + n tokens, those up to where the checkpoint will stand
    goes_on: bool  # whether there is a checkpoint


class StepRows:
    """The rows of a step in groups, for all modules of a stage: they keep as many inputs."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._batch: AttentionBatch | None = None
        self._groups: list[RowGroup] = []

    def groups(self, num_ring: int) -> list[RowGroup]:
        """Return the groups of the step that runs, with rings of so many entries; waits for the device."""
        batch = self.step.batch
        if batch is not self._batch:
            self._batch, self._groups = batch, list(self._made(batch, num_ring))
        return self._groups

    def _made(self, batch: AttentionBatch, num_ring: int) -> Iterator[RowGroup]:
        spans = batch.spans
        assert spans is not None, "the step says nothing of its rows"
        listed = torch.stack([each.long() for each in (spans.rows, spans.starts, spans.held, spans.kept)], 1).tolist()
        begins = spans.query_start_loc.tolist()
        alike: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
        for (row, start, held, kept), (begin, end) in zip(listed, pairwise(begins), strict=True):
            assert held <= start, "a position before the checkpoint is computed"
            num_new = end - begin
            num_written = min(num_new, start + num_new - kept)
            form = (start - held, num_new, kept - held, num_written, held > 0)
            alike[form].append((row, begin, start, held))
        device = spans.rows.device
        for (num_before, num_new, num_first, num_written, goes_on), members in alike.items():
            for some in torch.tensor(members).to(device).split(max(1, _MOST_TOKENS // (num_before + num_new))):
                rows, begins, starts, places = some.unsqueeze(2).unbind(1)  # [B, 1] each
                count = partial(torch.arange, device=device)
                written = starts + count(num_new - num_written, num_new)
                yield RowGroup(
                    rows.flatten(),
                    begins + count(num_new),
                    (places + count(num_before)) % num_ring,
                    written % num_ring,
                    num_first,
                    bool(goes_on),
                )


class RowModule:
    """A module with a state, in the place of its `forward`: rows of a step in groups.

    Args:
        module: As transformers has it.
        config: The model's.
        shape: What it keeps.
        rows: Of the stage.
        place: Of its layer among the stage's.
        index: Of it in its layer.
    """

    def __init__(
        self, module: nn.Module, config: Any, shape: ModuleState, rows: StepRows, place: int, index: int
    ) -> None:
        self._module = _Module(module, config, shape.tensors)
        self._takes_several = shape.takes_several
        self._rows = rows
        self._place = place
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns of a step's tokens, [1, T, ...]."""
        if is_tried():
            return self._module.forward(*args, **kwargs)
        x, call = self._module.called(args, kwargs)
        layer = self._rows.step.caches[self._place]
        assert isinstance(layer, ModulesMemory)
        memory, out = layer.modules[self._index], torch.empty(0)
        for group in self._rows.groups(memory.inputs.shape[1]):
            y = self._group(call, memory, x[0], group)
            if not len(out):
                out = y.new_empty(x.shape[1], *y.shape[2:])
            out[group.tokens] = y
        return out.unsqueeze(0)

    def _group(self, call: _Call, memory: ModuleMemory, new: torch.Tensor, group: RowGroup) -> torch.Tensor:
        """Return the outputs of rows' tokens, [B, n, ...], and leave their checkpoints. Shapes: new [T, W]."""
        rows = group.rows.unsqueeze(1)
        x = torch.cat((memory.inputs[rows, group.before], new[group.tokens]), 1)
        states = [tensor.index_select(0, group.rows) for tensor in memory.tensors] if group.goes_on else None
        outputs = []
        if group.num_first:
            y, states = self._run(call, x[:, : group.num_first], states)
            for tensor, state in zip(memory.tensors, states, strict=True):
                tensor.index_copy_(0, group.rows, state.to(tensor.dtype))
            outputs.append(y)
        y, _ = self._run(call, x[:, group.num_first :], states)
        outputs.append(y)
        num_written = group.written.shape[1]
        memory.inputs[rows, group.written] = x[:, x.shape[1] - num_written :]
        return torch.cat(outputs, 1)[:, -group.tokens.shape[1] :]

    def _run(
        self, call: _Call, x: torch.Tensor, states: Sequence[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the outputs of tokens that follow states, None: the beginning, and the states after them."""
        cache = self._module.cache(states)
        several = states is None or self._takes_several
        outputs = [call(part, cache) for part in ([x] if several else x.split(1, 1))]
        return torch.cat(outputs, 1), self._module.states(cache)


_Call = Callable[[torch.Tensor, Cache], torch.Tensor]


class _Module:
    """A module as transformers has it, with a layer of transformers' cache of its own."""

    def __init__(self, module: nn.Module, config: Any, tensors: Sequence[StateTensor]) -> None:
        self.forward: Callable[..., Any] = module.forward
        self._module = module
        self._chunk = getattr(module, _CHUNK, None)
        self._name = type(module).__name__
        self._tensors = tensors
        self._num_layers = config.num_hidden_layers
        self._num_states = getattr(config, "number_of_conv_states", 1)
        self._signature = inspect.signature(module.forward)
        names = list(self._signature.parameters)
        kinds = {each.kind: name for name, each in self._signature.parameters.items()}
        self._input, self._options = names[0], kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, _Call]:
        """Return the input of a call, [1, T, W], and what calls the module likewise with another input and a cache."""
        given = self._signature.bind(*args, **kwargs).arguments
        x, options = given.pop(self._input), given.pop(self._options, {})
        others = given | options
        taken = (*others, *self._signature.parameters)
        cache = next((name for name in CACHES if name in taken), None)
        if not isinstance(x, torch.Tensor) or cache is None:
            raise ModelLoadError(
                "a module with a state takes its input or its cache in a way that raypp does not know",
                got=f"{self._name}({', '.join(self._signature.parameters)})",
                expected=f"hidden states first, and one of {', '.join(CACHES)}",
            )
        if unknown := [name for name, value in others.items() if _has_tensors(value)]:
            raise ModelLoadError(
                "a module with a state takes more of a token than its hidden state",
                got=f"{self._name} with {', '.join(unknown)}",
                expected="hidden states alone: those of tokens before the step are kept",
            )
        return x, partial(self._call, others, cache)

    def _call(self, others: Mapping[str, Any], name: str, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        if isinstance(self._chunk, int):
            size = max(_LEAST_CHUNK, 1 << (x.shape[1] - 1).bit_length())
            setattr(self._module, _CHUNK, min(self._chunk, size))
        y: Any = self.forward(**{**others, self._input: x, name: cache})
        first, *more = y if isinstance(y, tuple) else (y,)
        if not isinstance(first, torch.Tensor) or any(map(_has_tensors, more)):
            raise ModelLoadError(
                "a module with a state returns more than an output of each token",
                got=f"{self._name}: {', '.join(type(each).__name__ for each in (first, *more))}",
                expected="one tensor, [1, tokens, ...]",
            )
        return first

    def cache(self, states: Sequence[torch.Tensor] | None) -> Cache:
        """Return a cache that holds rows' states; None: that holds nothing. Modules change it in place."""
        layer = LinearAttentionLayer(self._num_states)
        for of_module, state in zip(self._tensors, states or (), strict=states is not None):
            index = of_module.index
            getattr(layer, of_module.kind)[index] = state
            getattr(layer, f"is_{of_module.kind}_initialized")[index] = True
            layer.has_previous_state[index] = True
            layer.device, layer.dtype = state.device, state.dtype
            if of_module.kind == _CONV:
                layer.conv_kernel_size[index] = state.shape[-1]
        return Cache(layers=[layer] * self._num_layers)

    def states(self, cache: Cache) -> list[torch.Tensor]:
        """Return rows' states in a cache, [B, ...] each."""
        return [getattr(cache.layers[0], each.kind)[each.index] for each in self._tensors]


def _has_tensors(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensors, value)))


def has_states(config: Any) -> bool:
    """Return whether transformers' cache for a model has layers with states."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def states_of(
    layers: Iterable[nn.Module], config: Any, run: Callable[[Cache], object]
) -> list[tuple[ModuleState, ...]]:
    """Return what the modules of each layer keep of a row.

    Args:
        layers: Of the model, on the meta device, in 16 bits: what they keep in 32 is of that type always.
        config: The model's.
        run: Runs the model with a cache.

    Raises:
        ModelLoadError: a module uses its state in a way that raypp does not have.
    """
    cache = DynamicCache(config=config)
    written: dict[nn.Module, dict[tuple[str, int], Any]] = defaultdict(dict)  # and the layer of the cache
    calls: dict[nn.Module, list[tuple[Any, Any]]] = defaultdict(list)
    with _watched(layers, calls) as running:
        for of_layer in cache.layers:
            if isinstance(of_layer, LinearAttentionCacheLayerMixin):
                for kind, name in ((_CONV, "update_conv_state"), (_RECURRENT, "update_recurrent_state")):
                    _watch_update(of_layer, kind, name, running, written)
        run(cache)
    found = []
    for layer in layers:
        own = [(name, module) for name, module in layer.named_modules() if module in written]
        found.append(tuple(_state_of(name, module, config, written[module], calls[module]) for name, module in own))
    return found


def _state_of(
    name: str,
    module: nn.Module,
    config: Any,
    written: Mapping[tuple[str, int], Any],
    calls: Sequence[tuple[Any, Any]],
) -> ModuleState:
    if len(calls) != 1:
        raise ModelLoadError("a module with a state is called more than once", got=f"{name}, {len(calls)} times")
    states = {place: getattr(of_layer, place[0])[place[1]] for place, of_layer in written.items()}
    tensors = tuple(
        StateTensor(kind, index, tuple(state.shape[1:]), "" if state.dtype == torch.bfloat16 else "float32")
        for (kind, index), state in states.items()
    )
    called = _Module(module, config, tensors)
    x, call = called.called(*calls[0])
    takes_several = all(_reads(call, called, x, list(states.values()), index) for index in range(len(tensors)))
    return ModuleState(name, x.shape[-1], tensors, takes_several)


def _reads(call: _Call, module: _Module, x: torch.Tensor, states: Sequence[torch.Tensor], index: int) -> bool:
    """Return whether outputs of several tokens depend on one tensor of the state before them."""
    with torch.enable_grad():
        before = [torch.zeros_like(state) for state in states]
        before[index] = before[index].requires_grad_().clone()
        return call(x.new_zeros(1, _NUM_TOKENS, x.shape[-1]), module.cache(before)).requires_grad


@contextmanager
def _watched(layers: Iterable[nn.Module], calls: dict[nn.Module, list[tuple[Any, Any]]]) -> Iterator[list[nn.Module]]:
    """Yield the modules that run, the innermost last; `calls` gets the arguments of each."""
    running: list[nn.Module] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)
        calls[module].append((args, kwargs))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = []
    for module in dict.fromkeys(module for layer in layers for module in layer.modules()):
        hooks += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _watch_update(
    layer: Any, kind: str, name: str, running: Sequence[nn.Module], written: dict[nn.Module, dict[tuple[str, int], Any]]
) -> None:
    """Have a layer of the cache note which module writes what."""
    update = getattr(layer, name)

    def watched(states: torch.Tensor, state_idx: int = 0, **options: Any) -> Any:
        written[running[-1]][kind, state_idx] = layer
        return update(states, state_idx, **options)

    setattr(layer, name, watched)
