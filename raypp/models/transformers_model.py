"""The layers of a stage as transformers' own modules: for decoders that raypp declares no family of.

Transformers builds the whole model on the meta device, and only what this stage computes gets weights. Its classes run
as they are, with the kernel set's operations in place of some of their parts (`raypp.models.transformers_layers`).
Between stages one tensor travels, the residual stream, and behind it what later layers take of each token besides:

    other stage   `_Elsewhere` in place of the layer; the one before `start_layer` hands in what was received
    this stage    layers [start_layer, end_layer)
    other stage   `_Elsewhere`; the one at `end_layer` keeps what it is given, which goes to the next stage

So what a model does between embedding and first layer happens on the first stage alone, and what it does behind the
last layer on the last. Inputs of layers that are made of token ids are those of Gemma 4 (`per_layer_inputs`). A layer
that attends to keys and values of another is on its stage. A model whose layers take anything else gives other tokens
when it is cut; see `raypp.testing.try_decoder`.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from raypp.errors import ModelLoadError
from raypp.graphs.cost import GRAPH_MODES, GraphCost, GraphMode
from raypp.members import Members
from raypp.models.attention_config import ModulesConfig
from raypp.models.checkpoint_names import name_of_text
from raypp.models.config import ModelConfig
from raypp.models.decoder import Deepstack
from raypp.models.member_sizes import ONLY_MEMBER, Member, span_of
from raypp.models.quantization import Quantization
from raypp.models.transformers_layers import (
    ATTENTION,
    EXPERTS,
    NUM_TRIED_TOKENS,
    Held,
    LayerAttention,
    Step,
    attend_at,
    num_bytes,
    use_kernels,
)
from raypp.models.transformers_members import (
    EXPERT_BIAS,
    ModuleParts,
    cut_model,
    cut_vocabulary,
    parts_of,
    read_parts,
)
from raypp.models.transformers_states import RowModule, StepRows
from raypp.models.weight_formats import check_shape, part_of, quantized_tensors, require_floats
from raypp.models.weights import CheckpointWeights, DummyWeights, WeightSource
from raypp.ops.attention import AttentionBatch
from raypp.ops.backend import KernelSet, LMHead
from raypp.ops.member_kernels import with_members
from raypp.ops.row_state import LayerMemory
from raypp.ops.sample.vocabulary_part import VocabularyPart, hide_padding
from raypp.ops.weight import Weight, own_copy, stacked_weights

_LOG = logging.getLogger(__name__)
_MOST_SAID = 400
_POSITIONS = "position_ids"
_OF_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


def empty_model(path: Path, dtype: torch.dtype, *, trusts_code: bool = False) -> Any:
    """Return transformers' model of a directory's config.json on the meta device.

    Args:
        path: The directory.
        dtype: Of its parameters.
        trusts_code: Whether code in the directory may be run.

    Raises:
        ModelLoadError: transformers has no decoder of that configuration, or by code that is not trusted.
    """
    said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if said.get("auto_map") and said.get("model_type") not in CONFIG_MAPPING and not trusts_code:
        raise ModelLoadError(
            "it needs code that comes with it",
            got=f"auto_map={said['auto_map']}, and trust_remote_code=false",
            expected="trust_remote_code=true, for code that was read: it can do whatever you can",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusts_code)
        config = config.get_text_config(decoder=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype, trust_remote_code=trusts_code
            )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelLoadError(
            f"{path}: transformers makes no decoder of its config.json",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_SAID],
            expected="a model type of transformers that generates text",
        ) from error
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)
    return model.eval()


def as_positions(model: nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the argument that tells a model positions, [1, T]; nothing where it asks for none."""
    taken = inspect.signature(model.forward).parameters
    is_hidden = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in taken.values())  # behind `*args`
    return {_POSITIONS: positions} if _POSITIONS in taken or is_hidden else {}


def makers_of_inputs(model: Any) -> dict[str, nn.Module]:
    """Return the decoder's modules, by name, that make what each layer takes of a token besides the residual stream."""
    return {name: module for name, module in model.get_decoder().named_children() if name in _OF_INPUTS}


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder layers of transformers' model.

    Raises:
        ModelLoadError: it has no list of them.
    """
    num_layers = model.config.num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ModelLoadError(
        f"{type(model).__name__} keeps its layers in no list, so that no stage can have some of them",
        expected=f"{num_layers} layers in a ModuleList",
    )


def _covers(form: Quantization, name: str) -> bool:
    """Return whether a form is that of a parameter: of a linear layer, or of all experts as one."""
    return form.covers(name.removesuffix(".weight")) and name.endswith(".weight") != form.is_of_experts


def is_of_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of a module is a weight of all experts: of a number of matrices."""
    return parameter.ndim == 3 and not isinstance(module, nn.Conv1d)


def _places(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, str]]:
    """Return by their names the weights of linear layers and of experts in some layers: whose they are, and as what."""
    own = {module for layer in layers for module in layer.modules()}
    return {
        f"{prefix}.{name}": (module, name)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if module in own
        and parameter is not None
        and (is_of_experts(module, parameter) or (type(module) is nn.Linear and name == "weight"))
    }


def _as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter that transformers does not draw again."""
    made = nn.Parameter(tensor, requires_grad=False)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


class _InPlaceOf(nn.Module):
    """Stands where another module is, which a model may ask for the kind of a layer, factors, buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # no module of this one

    def __getattr__(self, name: str) -> Any:
        """Return what the module has that this one has not."""
        return getattr(self.__dict__["_module"][0], name)


class _Elsewhere(_InPlaceOf):
    """Stands where another stage's layer is: hands in what was received, or passes on; keeps what it was given.

    Or where a module of the last stage is, behind its layers.

    Args:
        layer: The other stage's.
        num_outputs: Elements of the tuple that it returns; None: it returns a tensor.
    """

    def __init__(self, layer: nn.Module, num_outputs: int | None) -> None:
        super().__init__(layer)
        self._num_outputs = num_outputs
        self.received: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.seen = hidden
        left = hidden if self.received is None else self.received
        return left if self._num_outputs is None else (left, *[None] * (self._num_outputs - 1))


@dataclass
class _Decoded(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """What any decoder returns."""

    cache_params: Any = None
    shared_kv_states: Any = None


class _Given(_InPlaceOf):
    """Stands where the decoder is while logits are computed: returns the hidden states of the rows."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__(decoder)
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Decoded:
        return _Decoded(last_hidden_state=self.hidden)


class _Head(nn.Module):
    """The LM head by the kernel set, [1, N, H] to float32 [1, N, V]."""

    def __init__(self, head: LMHead, weight: torch.Tensor, bias: torch.Tensor | None, *, is_tied: bool) -> None:
        super().__init__()
        self.num_bytes = (0 if is_tied else weight.nbytes) + (0 if bias is None else bias.nbytes)
        self.weight = torch.empty_like(weight, device="meta")  # what a model asks for its type
        self._head = head
        self._bias = bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden[0].contiguous()).unsqueeze(0)
        return logits if self._bias is None else logits + self._bias


class _LayerInputs:
    """What layers take of each token besides the residual stream: those of a stage, and of later ones.

    Shapes: rows [T, number of layers, P].
    """

    def __init__(self, rows: torch.Tensor, start_layer: int) -> None:
        self.rows = rows
        self._start_layer = start_layer

    def __getitem__(self, place: tuple[slice, slice, int, slice]) -> torch.Tensor:
        """Return those of a layer, [1, T, P], as transformers asks for them; of a layer before these, any."""
        return self.rows[:, max(0, place[2] - self._start_layer)].unsqueeze(0)


class TransformersModel:
    """The layers [start_layer, end_layer) of any decoder; see `raypp.stage.stage_model.StageModel`."""

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        *,
        start_layer: int,
        end_layer: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet,
        members: Members | None = None,
    ) -> None:
        self.hidden_size = config.hidden_size
        self.kernels = with_members(kernels, members)
        self._part = None if members is None else VocabularyPart(members, config.vocab_size)
        self._member = ONLY_MEMBER if members is None else Member(members.rank, members.count)
        self.taps: dict[int, torch.Tensor] = {}
        self.costs: dict[str, GraphCost] = {}
        self.draft_head = None
        self._config = config
        self._path = path
        self._device, self._dtype = device, dtype
        self._own = range(start_layer, end_layer)
        self._is_first, self._is_last = start_layer == 0, end_layer == config.num_layers
        self._model = model = empty_model(path, dtype, trusts_code=config.trusts_code)
        self._parts: ModuleParts | None = None
        self._of_vocabulary: Collection[str] = ()
        if self._part is not None:
            self._parts = parts_of(model, layers_of(model))
            cut_model(model, self._parts, self._part.members.count)
            self._of_vocabulary = cut_vocabulary(model, self._part)
        self._decoder = model.get_decoder()
        self._step = Step()
        self._waits: str | None = None
        self._keeps_states = False
        self._attentions: list[LayerAttention] = []
        layers, rows = layers_of(model), StepRows(self._step)
        assert config.measured is not None
        for index, layer in enumerate(layers):
            if index in self._own:
                mixer, keeper = config.attention[index], index
                if mixer.attention is not None and mixer.attention.source is not None:
                    keeper = mixer.attention.source  # whose cache gets the same keys and values once more
                group = config.group_of(keeper)
                if mixer.attention is not None and group is not None:
                    made = LayerAttention(self._step, keeper - start_layer, mixer.attention, group, kernels)
                    attend_at(layer, made)
                    self._attentions.append(made)
                for number, shape in enumerate(mixer.modules if isinstance(mixer, ModulesConfig) else ()):
                    module = layer.get_submodule(shape.name)
                    place = (rows, index - start_layer, number)
                    setattr(module, "forward", RowModule(module, model.config, shape, *place))  # noqa: B010
                    self._keeps_states = True
            else:
                layers[index] = _Elsewhere(layer, config.measured[index].num_outputs)
        self._before = None if self._is_first else cast("_Elsewhere", layers[start_layer - 1])
        self._behind = None if self._is_last else cast("_Elsewhere", layers[end_layer])
        if not (self._is_first or (self._is_last and config.tie_word_embeddings)):
            model.set_input_embeddings(nn.Identity())
        if not self._is_last:
            model.set_output_embeddings(nn.Identity())
        for name in () if self._is_last else config.modules_behind:
            self._set(name, _Elsewhere(model.get_submodule(name), None))
        if self._config.layer_inputs.size:
            self._make_inputs = self._decoder.project_per_layer_inputs
            self._decoder.project_per_layer_inputs = lambda _, made: made
            for name in () if self._is_first else makers_of_inputs(model):
                setattr(self._decoder, name, nn.Identity())
        self._given = _Given(self._decoder)
        self._lock = RLock()  # kernels are compiled in threads, and modules keep what passes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stage's weights, tied ones counted once."""
        own: int = sum(each.nbytes for each in {id(each): each for each in self._model.parameters()}.values())
        head = self._model.get_output_embeddings()
        return own + num_bytes(self._model) + (head.num_bytes if isinstance(head, _Head) else 0)

    def owns_tensor(self, name: str) -> bool:
        """Return whether a tensor that was not read should have been: of these modules none is known to be."""
        return False

    def load_weights(self, source: WeightSource) -> None:
        """Read this stage's tensors, and no others.

        Raises:
            ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        transformers.utils.logging.disable_progress_bar()
        model, device_map = self._model, {"": self._device}
        layers = [layers_of(model)[index] for index in self._own]
        places = _places(model, layers)
        held: Held = {}  # weights of few bits, as they are
        if isinstance(source, CheckpointWeights):
            load = LoadStateDictConfig(
                weight_mapping=get_model_conversion_mapping(model), dtype=model.dtype, device_map=device_map
            )
            slices = self._slices(source, places, held)
            if self._parts is not None and self._part is not None:
                slices = read_parts(slices, self._parts, self._of_vocabulary, self._part, load.weight_mapping)
            info, _ = convert_and_load_state_dict_in_model(model, slices, load)
            parameters = {name for name, _ in model.named_parameters()} - self._tied
            parameters -= {name for name, place in places.items() if place in held}
            for name, got, expected in sorted(info.mismatched_keys):
                raise ModelLoadError(
                    f"{self._path}: tensor {name} has the wrong shape",
                    got=list(got),
                    expected=f"{list(expected)}, by config.json",
                )
            if missing := sorted(info.missing_keys & parameters):
                raise ModelLoadError(
                    f"{self._path} lacks tensors",
                    got=f"none for {', '.join(missing[:5])}",
                    expected=f"all that {type(model).__name__} has",
                )
        else:
            for name, parameter in list(model.named_parameters()):
                if name not in self._tied:
                    self._draw(source, name, parameter, places.get(name), held)
        for module, name in held:  # takes no memory, and is replaced by a product of the kernel set
            nothing = torch.zeros((), dtype=self._dtype, device=self._device)
            setattr(module, name, _as_parameter(nothing.expand(getattr(module, name).shape)))
        for name in self._tied:
            self._set(name, model.get_input_embeddings().weight)
        buffers = {name for name, buffer in model.named_buffers() if buffer.is_meta}
        model._move_missing_keys_from_meta_to_device(buffers, device_map, None, None)
        model._initialize_missing_keys(False)  # buffers that no checkpoint holds: rotary tables
        model.requires_grad_(False)
        for name, tensor in self._tensors():
            assert not tensor.is_meta, name
        if self._is_last:
            head = model.get_output_embeddings()
            is_tied = self._config.tie_word_embeddings
            kernel = self.kernels.lm_head(Weight(head.weight), is_shared=is_tied)
            model.set_output_embeddings(_Head(kernel, head.weight, getattr(head, "bias", None), is_tied=is_tied))
            path = next(name for name, module in model.named_modules() if module is self._decoder)
            owner, _, self._name = path.rpartition(".")
            self._owner = model.get_submodule(owner)
        names = () if self._parts is None else self._parts.summed
        summed = [module for name, module in model.named_modules() if name in names]
        for module in summed if self._member.rank else ():  # a bias is added once
            if type(module) is nn.Linear:
                module.register_parameter("bias", None)
            elif module._parameters.get(EXPERT_BIAS) is not None:
                module._parameters[EXPERT_BIAS] = _as_parameter(torch.zeros_like(module.get_parameter(EXPERT_BIAS)))
        run = self._run_once
        self._waits = use_kernels(self._decoder, layers, self._attentions, self.kernels, run, held, summed)
        if self._device.type == "cpu":  # a file that is replaced later must not change a running engine
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        why = f"asks the device for something on the way: {self._waits}" if self._waits else None
        why = "keeps states of rows" if self._keeps_states else why
        if why is not None:
            first, last = self._own.start, self._own.stop - 1
            _LOG.warning("layers %d to %d: all steps run eagerly, for %s %s", first, last, type(model).__name__, why)

    def _draw(
        self, source: WeightSource, name: str, parameter: nn.Parameter, place: tuple[nn.Module, str] | None, held: Held
    ) -> None:
        """Give a parameter the part of random weights that is this member's."""
        form, shape = self._config.quantization, list(parameter.shape)
        cut = None if self._parts is None else self._parts.cuts.get(name)
        if cut is not None:
            shape[cut.dim] = cut.size
        if form is not None and isinstance(source, DummyWeights) and place is not None and _covers(form, name):
            if getattr(place[0], "is_transposed", False):
                shape[-2:] = shape[:-3:-1]
            weight = source.quantized(name, tuple(shape), form).mapped(lambda part: part.to(self._device))
            blocks = [] if cut is None else cut.blocks(shape[-2], shape[-1], self._member)
            parts = [part_of(weight, span_of(outputs), span_of(inputs), self._dtype) for outputs, inputs in blocks]
            held[place] = stacked_weights(parts) if parts else weight
            return
        part = self._part if name in self._of_vocabulary else None
        if part is not None:
            shape[0] = part.vocab_size
        tensor = source.get(name, tuple(shape), parameter.dtype)
        if cut is not None:
            tensor = own_copy(cut.of(tensor, self._member))
        elif part is not None:
            tensor = part.rows_of(tensor)
        self._set(name, _as_parameter(tensor.to(self._device)))

    def _slices(
        self,
        source: CheckpointWeights,
        places: Mapping[str, tuple[nn.Module, str]],
        held: Held,
    ) -> dict[str, Any]:
        """Return a checkpoint's tensors; weights of few bits that have a place go to `held` instead."""
        slices, form = source.slices(), self._config.quantization
        if form is not None:
            names = set(slices)
            if form.format == "online_fp8":
                names = {name for name in slices if (own := name_of_text(name)) in places and _covers(form, own)}
            found, used = quantized_tensors(names, source, form, self._dtype, self._device)
            slices = {name: tensor for name, tensor in slices.items() if name not in used}
            for name, tensor in found.items():
                place = places.get(name_of_text(name))
                cut = self._parts and self._parts.cuts.get(name_of_text(name))
                if place is None:
                    slices[name] = tensor
                else:
                    held[place] = (tensor.of(partial(cut.blocks, member=self._member)) if cut else tensor).read()
                    check_shape(name, held[place], tuple(getattr(*place).shape))
        require_floats({name: tensor.get_dtype() for name, tensor in slices.items()})
        return {name_of_text(name): tensor for name, tensor in slices.items()}

    def _run_once(self) -> torch.Tensor:
        entering = self._config.stream_size(self._own.start)
        stream = torch.ones(NUM_TRIED_TOKENS, entering, dtype=self._dtype, device=self._device)
        return self._run(stream, torch.arange(NUM_TRIED_TOKENS, device=self._device))

    @property
    def _tied(self) -> set[str]:
        """The name of the LM head's weight where it is the embedding; empty where it is not, or not here."""
        head = self._model.get_output_embeddings()
        if not (self._is_last and self._config.tie_word_embeddings):
            return set()
        return {f"{name}.weight" for name, module in self._model.named_modules() if module is head}

    def _set(self, name: str, part: nn.Parameter | nn.Module) -> None:
        owner, _, last = name.rpartition(".")
        setattr(self._model.get_submodule(owner), last, part)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """Elements of attention's output per token, Hq * Dv, of any of the layers; all differ."""
        attention = [self._config.attention[index].attention for index in self._own]
        return tuple({each.output_size: None for each in attention if each is not None})

    @property
    def graph_modes(self) -> Collection[GraphMode]:
        """Which graphs can hold the stage's steps."""
        if self._waits or self._keeps_states:
            return ()
        return GRAPH_MODES if self.kernels.can_be_recorded or self._device.type == "cpu" else ("piecewise",)

    def plan_attention(self, attention: AttentionBatch, ring_entry: int) -> None:
        """Do the host's part of a step's attention; see `raypp.ops.backend.KernelSet`."""
        if self._attentions:
            self.kernels.plan_attention(attention, ring_entry)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, [T, H], and behind them inputs of all layers, if these take any.

        First stage only. Shapes: input_ids [T] int32 or int64.
        """
        embedding, ids = self._model.get_input_embeddings(), input_ids.unsqueeze(0)
        part = self._part
        embedded: torch.Tensor = embedding(ids)[0] if part is None else part.embedded(input_ids, embedding)
        return self._with_inputs(embedded, ids)

    def embed_items(self, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings of images, [N, H], as `embed` does those of tokens: rows of tables are those of padding."""
        padding = self._model.config.pad_token_id or 0
        return self._with_inputs(rows, torch.full((1, len(rows)), padding, device=rows.device))

    def _with_inputs(self, embedded: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not self._config.layer_inputs.size:
            return embedded
        made = self._make_inputs(embedded.unsqueeze(0), self._decoder.get_per_layer_inputs(ids, None))
        return torch.cat((embedded, made[0].flatten(1)), -1)

    @torch.inference_mode()
    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        kv_caches: Sequence[LayerMemory],
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Return what travels on, [T, H]: the residual stream, on the last stage the decoder's output.

        Shapes: hidden [T, H]; positions [T] int64. Inputs of layers lie behind the residual stream: in `hidden` of this
        stage's and of later ones, in what is returned of later ones.
        """
        assert deepstack is None, "no tower beside transformers' modules has taps"
        with self._lock:
            self._step.begin(positions, attention, kv_caches)
            return self._run(hidden, positions)

    def _run(self, stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {**as_positions(self._decoder, positions.unsqueeze(0))}
        hidden, size = stream, self._config.layer_inputs.size
        if size:
            hidden, rows = stream.tensor_split((self.hidden_size,), -1)
            given["per_layer_inputs"] = _LayerInputs(rows.unflatten(-1, (-1, size)), self._own.start)
        if self._before is not None:
            self._before.received = hidden.unsqueeze(0)
        output = self._decoder(inputs_embeds=hidden.unsqueeze(0), use_cache=False, **given).last_hidden_state
        left: torch.Tensor | None = output if self._behind is None else self._behind.seen
        assert left is not None
        if not size or self._is_last:
            return left[0]
        return torch.cat((left[0], stream[:, self.hidden_size + len(self._own) * size :]), -1)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [N, V] float32; in `out` if that is given. Last stage only. Shapes: hidden [N, H]."""
        with self._lock:
            self._given.hidden = hidden.unsqueeze(0)
            setattr(self._owner, self._name, self._given)
            try:
                logits: torch.Tensor = self._model(inputs_embeds=self._given.hidden, use_cache=False).logits[0]
            finally:
                setattr(self._owner, self._name, self._decoder)
        return hide_padding(logits.float() if out is None else out.copy_(logits), self._part)
