"""Builds a stage: threads, weights, KV cache, links."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from raypp.errors import ConfigError
from raypp.members import Members
from raypp.models.attention_config import GatedDeltaConfig, ModulesConfig
from raypp.models.checkpoint_names import PICKLED_FILE, has_safetensors
from raypp.models.config import ModelConfig
from raypp.models.decoder import DecoderModel, HeadSupport, compile_layers
from raypp.models.draft_head import DraftHead
from raypp.models.member_sizes import Member, Span, part_of_experts
from raypp.models.registry import build_model
from raypp.models.weights import PickledWeights, WeightReader, WeightSource, open_weights, warn_of_unread
from raypp.ops.device_kernels import choose_kernels, choose_token_choice, make_first_sums
from raypp.ops.invariance_check import InvarianceCheck
from raypp.ops.kv_cache import allocate_layer_cache
from raypp.ops.member_kernels import with_members
from raypp.ops.row_state import LayerMemory, ModulesMemory, allocate_layer_state, allocate_module_memory
from raypp.ops.sample.vocabulary_part import VocabularyPart
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage import Stage
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import DraftHeadSpec, StageSpec
from raypp.tracing import Tracer
from raypp.transport.open import StageMembers, open_members, open_stage_links
from raypp.transport.rendezvous import Rendezvous

StageFactory = Callable[[StageSpec, ModelConfig], StageModel]
"""Makes a stage's model in place of the one that the checkpoint names; see `raypp.testing.FakeStage`. With
`makes_members = True` it makes those of members, too, and sums by itself where these have parts."""

_UNUSED = {  # of draft heads
    "t2d",  # which tokens a head can draft, the other way round than d2t; only training needs it
    "embed_tokens.weight",  # of MTP heads: copies of the model's
    "shared_head.head.weight",
}
_NUM_KEPT_PRODUCTS = 32
"""Shapes of matrix products that oneDNN, and torch's layer above it, keep prepared; see docs/design/0062."""


def configure_torch(num_threads: int, device: str) -> None:
    """Set this process's compute threads, and the calling thread's GPU before anything else touches one."""
    torch.set_num_threads(num_threads)
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # both are read at the first product
        os.environ.setdefault(name, str(_NUM_KEPT_PRODUCTS))
    enter_device(device)


def enter_device(device: str) -> None:
    """Make `device` the calling thread's if it is a GPU. Each thread begins with GPU 0; actors are called from many."""
    if device != "cpu":
        torch.cuda.set_device(device)


def build_stage_model(
    spec: StageSpec, config: ModelConfig, factory: StageFactory | None, members: Members | None = None
) -> StageModel:
    """Return the stage's layers with their weights; of a member of a stage, its parts of them.

    Raises:
        ModelLoadError: the checkpoint cannot be read.
        ConfigError: a factory, and several members; bits of a row that depend on others, and must not.
    """
    if factory is not None and spec.num_members > 1 and not getattr(factory, "makes_members", False):
        raise ConfigError(
            "this stage_factory makes stages of one member",
            got=f"tensor_parallel_size={spec.num_members}, and a stage_factory without makes_members",
            expected="tensor_parallel_size = 1",
            hint="one that makes parts of stages, and sums over them by itself, has the attribute makes_members = True",
        )
    if factory is not None:
        return factory(spec, config)
    dtype, device = getattr(torch, spec.dtype), torch.device(spec.device)
    kv_dtype, check = getattr(torch, spec.kv_dtype), None
    kernels = choose_kernels(
        device,
        dtype,
        block_size=spec.block_size,
        max_query_len=1 + spec.max_drafts,
        num_ring_entries=spec.num_ring_entries,
        kv_dtype=kv_dtype,
        for_compiler=spec.graphs.compile_backend is not None,
        is_invariant=spec.is_batch_invariant,
    )
    if spec.is_batch_invariant:
        check = InvarianceCheck(kernels, device, dtype, kv_dtype, spec.block_size)
        kernels = check.as_kernels
    model = build_model(
        config,
        start_layer=spec.start_layer,
        end_layer=spec.end_layer,
        dtype=dtype,
        device=device,
        kernels=kernels,
        head_support=_head_support(spec),
        path=Path(spec.model_path),
        members=members,
    )
    source = open_weights(spec.load_format, spec.model_path, spec.seed, device)
    model.load_weights(source)
    warn_of_unread(source, f"stage {spec.stage_index}", model.owns_tensor, _experts_of(config, spec))
    if isinstance(model, DecoderModel) and spec.graphs.compile_backend is not None:
        compile_layers(model, spec.max_step_tokens, spec.graphs.compile_backend)
    if isinstance(model, DecoderModel) and spec.draft_head is not None and spec.is_last:
        model.draft_head = _build_draft_head(spec, spec.draft_head, config, model, members)
    if check is not None:
        check.run()
    return model


def _head_support(spec: StageSpec) -> HeadSupport | None:
    if spec.draft_head is None:
        return None
    head = spec.draft_head.config
    return HeadSupport(
        tap_depths=spec.tap_depths,
        max_tokens=spec.max_step_tokens,
        gives_embedding=spec.is_last and not head.has_embedding,
        gives_lm_head=spec.is_last and not head.has_lm_head,
    )


def _build_draft_head(
    spec: StageSpec, head: DraftHeadSpec, config: ModelConfig, model: DecoderModel, members: Members | None
) -> DraftHead:
    """Return the head on the last stage, with its weights. It computes with kernels of its own if its heads differ."""
    dtype, device, layer = getattr(torch, spec.dtype), torch.device(spec.device), head.config.layer
    kernels = model.kernels
    if any(each.cache != layer.attending[0].cache for each in config.attending):
        own = choose_kernels(device, dtype, block_size=spec.block_size, kv_dtype=getattr(torch, spec.kv_dtype))
        kernels = with_members(own, members)
    source: WeightSource = open_weights(spec.load_format, head.path, spec.seed, device)
    if spec.load_format != "dummy" and not has_safetensors(Path(head.path)):
        source = PickledWeights(Path(head.path) / PICKLED_FILE)
    prefix = (config.mtp_prefix if head.model is None else None) or ""
    member = Member(spec.rank, spec.num_members)
    weights = WeightReader(source, dtype, device, prefix, layer.quantization, member)
    part = None if members is None else VocabularyPart(members, layer.vocab_size)
    choice = choose_token_choice(device, spec.max_step_rows, part)
    built = DraftHead(head.config, model, weights, kernels, choice, part)
    warn_of_unread(
        source,
        "the draft head",
        lambda name: name.startswith(prefix) and name.removeprefix(prefix) not in _UNUSED,
        _experts_of(layer, spec),
    )
    return built


def _experts_of(config: ModelConfig, spec: StageSpec) -> Span | None:
    return None if config.experts is None else part_of_experts(config.experts, Member(spec.rank, spec.num_members))


def build_stage(
    spec: StageSpec,
    config: ModelConfig,
    model: StageModel,
    tracer: Tracer,
    *,
    rendezvous: Rendezvous | None,
    own_host: str,
    open_timeout_s: float,
    members: StageMembers | None = None,
) -> Stage:
    """Return the stage, linked to its neighbours; waits for them.

    Args:
        spec: Which stage.
        config: The whole model's.
        model: The stage's layers.
        tracer: Of this process.
        rendezvous: Where the stages meet; None for a single one.
        own_host: An address of this node that the neighbours can reach.
        open_timeout_s: How long the stages may take to meet.
        members: Of the stage, if it has several; they meet here.

    Raises:
        ConfigError: a neighbour expects other tensors; sums over members whose bits depend on other rows, and must not.
        DeadlineError: a neighbour does not come.
    """
    if members is not None:
        assert rendezvous is not None
        timeouts = {"open_timeout_s": open_timeout_s, "deadline_s": spec.link_timeout_s}
        open_members(members, spec.stage_index, rendezvous, own_host=own_host, **timeouts)
        of_activations = model.hidden_size, getattr(torch, spec.dtype), torch.device(spec.device)
        make_first_sums(members, *of_activations, is_invariant=spec.is_batch_invariant)
    schemas = StageSchemas.of(spec, model.hidden_size)
    links = open_stage_links(
        spec.transport,
        spec.stage_index,
        spec.num_stages,
        forward=schemas.forward_messages(spec),
        feedback=schemas.feedback_messages(spec),
        rendezvous=rendezvous,
        own_host=own_host,
        open_timeout_s=open_timeout_s,
        deadline_s=spec.link_timeout_s,
        device=torch.device(spec.device),
        members=members,
    )
    with nullcontext() if members is None else members.building():
        return Stage(spec, model, allocate_kv_caches(spec, config), links, schemas, tracer, members=members)


def allocate_kv_caches(spec: StageSpec, config: ModelConfig) -> list[LayerMemory]:
    """Return what the stage's layers keep, all zeros."""
    device, kept = torch.device(spec.device), list[LayerMemory]()
    of_layers = config.attention[spec.start_layer : spec.end_layer]
    sizes = (spec.max_num_seqs + spec.num_snapshots, spec.block_size, spec.max_drafts)
    dtype, has_snapshots = getattr(torch, spec.dtype), spec.num_snapshots > 0
    for group, layer in zip(spec.layer_groups, of_layers, strict=True):
        if isinstance(layer, GatedDeltaConfig):
            kept.append(allocate_layer_state(layer.cache, *sizes, dtype, device, has_snapshots=has_snapshots))
            continue
        cache = None
        if layer.attention is not None and group is not None:
            keeps = layer.attention.cache
            of_group = (spec.groups[group].num_blocks, spec.block_size, keeps.num_kv_heads, keeps.k_dim, keeps.v_dim)
            cache = allocate_layer_cache(*of_group, getattr(torch, spec.kv_dtype), device)
        if isinstance(layer, ModulesConfig) or cache is None:
            of_modules = layer.modules if isinstance(layer, ModulesConfig) else ()
            modules = [allocate_module_memory(each, *sizes, dtype, device) for each in of_modules]
            kept.append(ModulesMemory(cache, tuple(modules)))
        else:
            kept.append(cache)
    return kept
