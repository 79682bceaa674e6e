"""Finds out what a decoder of transformers needs, by running it on the meta device: `python -m` it with a directory.

A process of its own, since torch and transformers take seconds to import, which planning must not wait for twice: what
it prints is kept, see `raypp.models.asked`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from raypp.errors import ModelLoadError, RayppError
from raypp.models.asked import TRUSTS_CODE
from raypp.models.attention_config import AttentionConfig
from raypp.models.config import NO_INPUTS, CutSize, LayerInputs, MeasuredLayer, MeasuredLinear
from raypp.models.transformers_layers import attend_at
from raypp.models.transformers_members import ModuleParts, cut_model, parts_of
from raypp.models.transformers_model import as_positions, empty_model, is_of_experts, layers_of, makers_of_inputs
from raypp.models.transformers_states import CACHES, has_states, states_of
from raypp.ops.state_sizes import ModuleState

_NUM_TOKENS = 4
_EXPERTS = "raypp_probe"
_STATES = {"linear_attention", "conv", "hybrid"}
"""Kinds of layers that keep states of rows, for `hybrid` besides what attention keeps."""
_NOTHING = {"mlp", "moe"}
_SLIDING = {"sliding_attention", "hybrid_sliding"}
_KINDS = {"full_attention", *_SLIDING, *_STATES, *_NOTHING}
_TENSORS = {"s_aux", "position_ids"}
"""Options of attention that are known: sinks, and what the layer has used itself."""
_STRETCHED_BY_STEP = {"dynamic", "longrope"}
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "top_k")
"""How configurations call the experts that a token goes through."""


def _no_experts(module: nn.Module, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _no_experts)


class _Witness:
    """Stands for the attention of a layer, and writes down how it is called."""

    def __init__(
        self, index: int, layer: nn.Module, config: Any, kept: list[tuple[torch.Tensor, torch.Tensor, _Witness]]
    ) -> None:
        self.index = index
        self._kept = kept  # keys and values of layers before, and whose they are
        self.found: AttentionConfig | None = None
        self.module: object = None
        self._config = config
        self._window = next((w for m in layer.modules() if (w := getattr(m, "sliding_window", None))), None)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, options: Mapping[str, Any]
    ) -> torch.Tensor:
        if mask is not None:
            raise ModelLoadError("its layers make attention masks of their own", got=f"layer {self.index}")
        if not options["is_causal"]:
            raise ModelLoadError("its layers attend to later tokens", got=f"layer {self.index}")
        unknown = [name for name, value in options.items() if isinstance(value, torch.Tensor) and name not in _TENSORS]
        if unknown:
            raise ModelLoadError(
                "its layers give attention more than queries, keys and values",
                got=f"layer {self.index}: {', '.join(unknown)}",
            )
        found = AttentionConfig(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            v_dim=value.shape[3],
            rope=None,
            window=self._window_of(options),
            scale=options.get("scaling"),
            soft_cap=options.get("softcap"),
            has_sinks=options.get("s_aux") is not None,
        )
        if self.found is not None:
            raise ModelLoadError("a layer attends more than once", got=f"layer {self.index}")
        source = next((layer for k, v, layer in self._kept if k is key and v is value), None)
        if source is not None and source.found is not None and source.found.cache == found.cache:
            found = replace(found, source=source.index)
        else:
            self._kept.append((key, value, self))
        self.found, self.module = found, options["module"]
        return query.new_empty(1, query.shape[2], found.num_heads, found.v_dim)

    def _window_of(self, options: Mapping[str, Any]) -> int | None:
        """Return the layer's window; some families leave it to the mask that transformers would make."""
        kinds = getattr(self._config, "layer_types", None)
        window = options.get("sliding_window")
        if window is None and (kinds is None or kinds[self.index] in _SLIDING):
            window = self._window or (kinds and getattr(self._config, "sliding_window", None))
        return window or None


def probe(path: Path, *, trusts_code: bool = False, num_members: int = 1) -> dict[str, Any]:
    """Return what planning needs of a model, as JSON has it; see `raypp.models.config`.

    With several members of a stage, sizes are those of one, but for the vocabulary.

    Raises:
        ModelLoadError: transformers does not have it, or it needs what raypp cannot give.
    """
    model = empty_model(path, torch.float32, trusts_code=trusts_code)
    _refuse_unknown(model)
    keeps_states = has_states(model.config)
    if keeps_states:  # parts of states are in 32 bits whatever the others are
        model = empty_model(path, torch.bfloat16, trusts_code=trusts_code).requires_grad_(False)
    config, layers = model.config, layers_of(model)
    parts = parts_of(model, layers)
    if num_members > 1:
        cut_model(model, parts, num_members)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(_EXPERTS)
    kept: list[tuple[torch.Tensor, torch.Tensor, _Witness]] = []
    witnesses = [_Witness(index, layer, config, kept) for index, layer in enumerate(layers)]
    for witness, layer in zip(witnesses, layers, strict=True):
        attend_at(layer, witness)
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    logits, num_outputs = torch.empty(0), dict[nn.Module, int | None]()

    def note(module: nn.Module, _: Any, output: Any) -> None:
        num_outputs[module] = len(output) if isinstance(output, tuple) else None

    others = [each for each in model.get_decoder().children() if not {*each.modules()} & {*layers}]
    for module in (*layers, *others):
        module.register_forward_hook(note)

    def run(**options: Any) -> None:
        nonlocal logits
        logits = model(input_ids=ids, **as_positions(model, ids), **options).logits

    states: list[tuple[ModuleState, ...]] = [()] * len(layers)
    with torch.no_grad():
        if keeps_states:
            name = next(name for name in CACHES if name in inspect.signature(model.forward).parameters)
            states = states_of(layers, config, lambda cache: run(use_cache=True, **{name: cache}))
        else:
            run(use_cache=False)
    kinds = getattr(config, "layer_types", None)
    for witness, of_layer in zip(witnesses, states, strict=True):
        if witness.found is None and not of_layer and (kinds is None or kinds[witness.index] not in _NOTHING):
            raise ModelLoadError(
                "a layer keeps neither keys and values nor a state",
                got=f"layer {witness.index}" + (f", {kinds[witness.index]}" if kinds else ""),
                expected="layers that use transformers' attention and its cache",
            )
    names: dict[object, str] = {module: name for name, module in model.named_modules()}
    names |= {parameter: name for name, parameter in model.named_parameters()}
    measured = [
        _measured(layer, config, names, num_outputs[layer], parts, witness)
        for layer, witness in zip(layers, witnesses, strict=True)
    ]
    ran = list(num_outputs)  # in the order of their first runs
    behind = [module for module in ran[1 + max(map(ran.index, layers)) :] if [*module.parameters()]]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is head.weight or bool(getattr(config, "tie_word_embeddings", False))
    return {
        "class": type(model).__name__,
        "vocab_size": logits.shape[-1],
        "hidden_size": embedding.weight.shape[1],
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "attention": [None if witness.found is None else asdict(witness.found) for witness in witnesses],
        "states": [[asdict(each) for each in of_layer] for of_layer in states],
        "layers": [asdict(each) for each in measured],
        "layer_inputs": _layer_inputs(model),
        "modules_behind": [names[module] for module in behind],
    }


def _layer_inputs(model: Any) -> LayerInputs:
    makers, make = makers_of_inputs(model), getattr(model.get_decoder(), "get_per_layer_inputs", None)
    if makers and (make is None or list(inspect.signature(make).parameters) != ["input_ids", "inputs_embeds"]):
        raise ModelLoadError(
            "its layers take inputs of token ids in a way that raypp does not have",
            got=type(model.get_decoder()).__name__,
            expected="layers without such inputs, or with those of Gemma 4",
        )
    num_parameters = sum(each.numel() for module in makers.values() for each in module.parameters())
    return LayerInputs(model.config.hidden_size_per_layer_input, num_parameters) if makers else NO_INPUTS


def _refuse_unknown(model: Any) -> None:
    """Refuse what neither the attention function is told nor a small copy with short prompts shows."""
    layers = set(layers_of(model))
    own = tuple(f"{name}." for name, module in model.named_modules() if module in layers)
    if shared := sorted(name for name in model.all_tied_weights_keys if name.startswith(own)):
        raise ModelLoadError("layers share weights", got=f"{shared[0]}, which is that of another layer")
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _KINDS
    if kinds or getattr(model.config, "attention_chunk_size", None):
        raise ModelLoadError(
            "layers attend in a way that raypp does not have",
            got=", ".join(sorted(map(str, kinds))) or f"attention_chunk_size={model.config.attention_chunk_size}",
            expected=f"layers of {' and '.join(sorted(_KINDS))}",
        )
    for name, module in model.named_modules():
        given = getattr(module, "rope_type", None)
        types = set(map(str, given.values() if isinstance(given, dict) else [given]))
        if stretched := types & _STRETCHED_BY_STEP:
            raise ModelLoadError(
                "positions are rotated by the longest text of a step, which would change the others",
                got=f"{name} with rope_type {', '.join(sorted(stretched))}",
                expected="a rope_type that depends on the position alone: default, linear, llama3 or yarn",
            )


def _measured(
    layer: nn.Module,
    config: Any,
    names: Mapping[object, str],
    num_outputs: int | None,
    parts: ModuleParts,
    witness: _Witness,
) -> MeasuredLayer:
    experts = [(each, own) for each in layer.modules() for own in each.parameters(False) if is_of_experts(each, own)]
    num_experts = max((len(parameter) for _, parameter in experts), default=0)
    chosen = next((getattr(config, name) for name in _CHOSEN if getattr(config, name, None)), num_experts)
    of_experts = sum(parameter.numel() for _, parameter in experts)
    linears = [module for module in layer.modules() if type(module) is nn.Linear]
    return MeasuredLayer(
        num_parameters=sum(parameter.numel() for parameter in layer.parameters()) - of_experts,
        num_expert_parameters=of_experts,
        share_chosen=min(1.0, int(chosen) / num_experts) if num_experts else 1.0,
        experts=tuple(_of_experts(names[own], each, own, parts) for each, own in experts),
        linears=tuple(
            MeasuredLinear(name := names[each], each.out_features, each.in_features, *parts.sides(f"{name}.weight"))
            for each in linears
        ),
        mlp_width=max((module.out_features for module in linears), default=0),
        num_outputs=num_outputs,
        cuts=tuple(_cuts(layer, names, parts, witness)),
    )


def _of_experts(name: str, module: nn.Module, parameter: nn.Parameter, parts: ModuleParts) -> MeasuredLinear:
    count, num_outputs, num_inputs = parameter.shape
    if getattr(module, "is_transposed", False):
        num_outputs, num_inputs = num_inputs, num_outputs
    return MeasuredLinear(name, num_outputs, num_inputs, *parts.sides(name), count)


def _cuts(layer: nn.Module, names: Mapping[object, str], parts: ModuleParts, witness: _Witness) -> Iterator[CutSize]:
    """Yield what members of a stage cut of a layer, before it is cut."""
    for module in layer.modules():
        if names[module] not in parts.summed:
            continue
        parent = names[module].rpartition(".")[0]
        if witness.found is not None and parent == names.get(witness.module):
            if witness.found.source is None:  # else they are another layer's
                yield CutSize("KV heads", witness.found.num_kv_heads, can_be_shared=parts.shares_kv_heads(parent))
            yield CutSize("heads", witness.found.num_heads, can_be_shared=False)
        else:
            below = names[module].removeprefix(f"{names[layer]}.")
            yield CutSize(f"dimensions of {below}", parts.inputs_of(names[module]), can_be_shared=False)


def answer(path: Path, num_members: str = "1", *, trusts_code: bool = False) -> dict[str, Any]:
    """Return what `probe` finds; or the error, as `error`."""
    try:
        return probe(path, trusts_code=trusts_code, num_members=int(num_members))
    except RayppError as error:
        return {"error": {"message": error.message, "got": error.got, "expected": error.expected}}
    except Exception as error:  # a model's own code may raise anything
        return {"error": {"message": "it does not run on the meta device", "got": f"{type(error).__name__}: {error}"}}


if __name__ == "__main__":
    # Modules that find these packages call their kernels, which know no meta device.
    for package in ("fla", "mamba_ssm", "causal_conv1d"):
        sys.modules[package] = None  # type: ignore[assignment]
    given = [each for each in sys.argv[1:] if each != TRUSTS_CODE]
    print(json.dumps(answer(Path(given[0]), *given[1:], trusts_code=TRUSTS_CODE in sys.argv)))
