"""What speculation takes, decided before anything starts: the head, the width of the token table, the policy for K."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ResourceError
from raypp.models.checkpoint_names import CHECKPOINT_FILES
from raypp.models.config import ModelConfig
from raypp.models.draft_head_config import DraftHeadConfig, load_draft_head_config, load_mtp_config, mtp_names
from raypp.models.families import FAMILIES
from raypp.models.member_sizes import of_one_member
from raypp.models.registry import resolve_draft_head_path
from raypp.models.sizes import embedding_bytes, layer_sizes, lm_head_bytes, total_reads
from raypp.plan.cost_model import FREE_STEP_TOKENS, step_duration
from raypp.plan.hardware import Hardware
from raypp.scheduler.drafts import SHADOW_SHARE, AdaptiveDrafts, DraftPolicy, FixedDrafts
from raypp.scheduler.step_budget import RooflineCost
from raypp.specdec.table_bytes import row_tokens_width, token_table_bytes, widest_window
from raypp.stage.stage_spec import NUM_PADDING_ROWS, DraftHeadSpec

_MAX_DEFAULT_WINDOW = 32768
_LAYERS_PER_DRAFT = 2  # what a draft by a head costs at least: its layer, and joining, LM head and choice


def ngram_window(config: EngineConfig, model: ModelConfig) -> int:
    """Return the newest tokens of a row that n-grams are looked for in; 0 without speculation."""
    if config.speculative.method is None:
        return 0
    longest = config.model.max_model_len or model.max_position_embeddings
    return min(config.speculative.ngram_window or _MAX_DEFAULT_WINDOW, longest)


def table_bytes(config: EngineConfig, window: int) -> int:
    """Return the bytes of the last stage's token table, the rows for padding included."""
    width = row_tokens_width(window, config.speculative.max_drafts)
    return token_table_bytes(config.scheduler.max_num_seqs + NUM_PADDING_ROWS, width)


def check_host_memory(config: EngineConfig, hardware: Hardware, window: int, other_bytes: int) -> None:
    """Refuse a token table that a last stage on a CPU has no memory for.

    Args:
        config: The rows.
        hardware: The memory; one of unknown size passes.
        window: Tokens of a row.
        other_bytes: The stage's weights and KV cache.

    Raises:
        ResourceError: says what would fit.
    """
    needed, left = table_bytes(config, window), max(hardware.memory_bytes - other_bytes, 0)
    if not window or not hardware.memory_bytes or needed <= left:
        return
    rows = config.scheduler.max_num_seqs + NUM_PADDING_ROWS
    max_drafts = config.speculative.max_drafts
    raise ResourceError(
        "the token table of speculation does not fit into the last stage's memory",
        got=f"{needed:,} bytes: {rows:,} rows of {row_tokens_width(window, max_drafts):,} tokens of 4 bytes",
        expected=f"at most {left:,} bytes: weights and KV cache take {other_bytes:,} of {hardware.memory_bytes:,}",
        hint=f"set ngram_window={widest_window(rows, left, max_drafts)} or less, or lower max_num_seqs",
    )


def draft_head(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    *,
    device: str,
    dtype: str,
    model_path: Path,
    find_head: Callable[[str], Path] = resolve_draft_head_path,
) -> tuple[DraftHeadConfig | None, Path]:
    """Return the head that drafts, None when none does, and where it is: for one of the model's own at `model_path`.

    Raises:
        ConfigError: the head is not of the kind that was asked for, or its weights cannot be.
        ModelLoadError: no such head, or one of another model.
    """
    given = config.speculative
    if not given.uses_head:
        return None, Path()
    is_dummy = config.model.load_format == "dummy"
    if given.model is None:
        own = load_mtp_config(model_path, model, is_dummy=is_dummy)
        if own is None:
            families = ", ".join(
                name for name, family in FAMILIES.items() if family.mtp_prefix is not None or family.has_mtp_layer
            )
            expected = f"tensors {model.mtp_prefix}{mtp_names(model).fc}.* in {model_path}: {CHECKPOINT_FILES}"
            if model.mtp_prefix is None and model.has_mtp_layer:
                expected = "num_nextn_predict_layers of 1 or more in config.json, and that layer in the checkpoint"
            elif model.mtp_prefix is None:
                expected = f"a model with an MTP head, of {families}"
            raise ConfigError(
                "the model has no head of its own that drafts",
                got=f"speculative.method {given.method}, {model.architecture}",
                expected=expected,
                hint='speculative.method = "ngram", or speculative.model names a head',
            )
        return replace(own, has_8_bit_weights=_has_8_bit_weights(config, hardware, device, dtype)), model_path
    path = find_head(given.model)
    head = load_draft_head_config(path, model, is_dummy=is_dummy)
    if given.method not in ("auto", head.kind):
        raise ConfigError(
            "the draft head is not of the kind that was asked for",
            got=f"speculative.method {given.method}, and {given.model} of kind {head.kind}",
            hint=f'speculative.method = "{head.kind}"',
        )
    layer = of_one_member(head.layer, model.num_members, part="the draft head")
    return replace(head, layer=layer, has_8_bit_weights=_has_8_bit_weights(config, hardware, device, dtype)), path


def _has_8_bit_weights(config: EngineConfig, hardware: Hardware, device: str, dtype: str) -> bool:
    asked, major_minor = config.speculative.head_weights, hardware.gpu_capability
    is_possible = device == "cuda" and dtype in ("bfloat16", "float16") and hardware.has_fp8
    if asked == "fp8" and not is_possible:
        raise ConfigError(
            "the draft head's weights cannot be read in 8 bits here",
            got=f"device {device}, dtype {dtype}, compute capability {'.'.join(map(str, major_minor))}",
            expected="a GPU of compute capability 8.9 or more, and a model in bfloat16 or float16",
            hint='speculative.head_weights = "auto"',
        )
    return is_possible and asked != "model"


def resolved_speculation(config: EngineConfig, window: int, head: DraftHeadSpec | None) -> dict[str, object]:
    """Return the settings of speculation that were left open, as they were decided."""
    settings: dict[str, object] = {"ngram_window": window} if config.speculative.method else {}
    return settings if head is None else settings | {"head_weights": head.config.weights_name}


def draft_head_bytes(head: DraftHeadConfig, model: ModelConfig, num_stages: int, dtype_bytes: int) -> int:
    """Return the bytes of weights that the last stage holds for the head, with an embedding that only it needs there.

    Args:
        head: What it is.
        model: The target, as one member of a stage has it.
        num_stages: A single stage has the target's embedding anyway; a last one has it if its LM head is tied. Members
            of a stage have a part of it, and the head looks tokens up in all of it.
        dtype_bytes: Of a weight.
    """
    own = head.weight_bytes(dtype_bytes)
    is_whole = model.num_members == 1 and (num_stages == 1 or model.tie_word_embeddings)
    if head.has_embedding or is_whole:
        return own
    return own + embedding_bytes(replace(model, num_members=1), dtype_bytes)


def usual_proposals(config: EngineConfig) -> float:
    """Return how many drafts a head makes for a row of a step while all stages are busy; 0: no head drafts."""
    given = config.speculative
    if not given.uses_head:
        return 0.0
    return SHADOW_SHARE if given.num_speculative_tokens is None else float(given.num_speculative_tokens)


def draft_head_spec(
    config: EngineConfig, path: Path, head: DraftHeadConfig, start_layers: Sequence[int]
) -> DraftHeadSpec:
    """Return what stages must know of the head.

    Args:
        config: Names it.
        path: Where it is.
        head: What it is.
        start_layers: The first layer of each stage.
    """
    # A state is what enters the layer of its depth: so the stage that computes that layer need not be sent it.
    tap_stages = tuple(max(bisect_right(start_layers, depth) - 1, 0) for depth in head.aux_depths)
    return DraftHeadSpec(model=config.speculative.model, path=str(path), config=head, tap_stages=tap_stages)


def speculation_bytes(
    config: EngineConfig, model: ModelConfig, window: int, head: DraftHeadSpec | None, dtype_bytes: int
) -> list[int]:
    """Return what speculation keeps on each stage, weights and KV aside: tapped hidden states, the token table."""
    kept = [0] * config.parallel.num_stages
    kept[-1] = table_bytes(config, window)
    if head is not None:
        tokens = config.scheduler.max_num_batched_tokens
        for _, stage_index in set(zip(head.config.aux_depths, head.tap_stages, strict=True)):
            kept[stage_index] += tokens * model.hidden_size * dtype_bytes
    return kept


def draft_policy(
    config: EngineConfig, device: str, model: ModelConfig, head: DraftHeadConfig | None, dtype_bytes: int
) -> DraftPolicy:
    """Return what chooses the number of drafts of each step."""
    given = config.speculative
    if given.method is None or given.num_speculative_tokens is not None:
        return FixedDrafts(given.max_drafts)
    drafting_cost = 0.0
    if head is not None:  # in the time of a step, which is that of reading its weights, or of starting its operations
        reads = total_reads(size.reads for size in layer_sizes(model, dtype_bytes))
        step_bytes = reads.always + lm_head_bytes(model, dtype_bytes)
        drafting_cost = max(
            head.drafting_bytes(1, dtype_bytes) / step_bytes, _LAYERS_PER_DRAFT / (model.num_layers + 1)
        )
    cost = draft_cost(model, dtype_bytes, device, given.free_step_tokens)
    return AdaptiveDrafts(given.ladder, config.parallel.num_stages, cost, drafting_cost=drafting_cost)


def draft_cost(model: ModelConfig, dtype_bytes: int, device: str, free_step_tokens: int | None = None) -> RooflineCost:
    """Return what a decode step costs as a function of its tokens.

    A token takes as long to compute whatever form its weights have, and reading these does not: a step that reads
    fewer bytes has fewer free tokens. Experts that a token is not multiplied by take none of its time.

    Args:
        model: With the form that its weights have on the device.
        dtype_bytes: Of activations, and of weights that are not quantized.
        device: `cpu` or `cuda`.
        free_step_tokens: Tokens that take as long to compute as to read what they are multiplied by, not quantized.
    """
    reads = total_reads(size.reads for size in layer_sizes(model, dtype_bytes))
    plain = layer_sizes(replace(model, quantization=None), dtype_bytes)
    head_bytes = lm_head_bytes(model, dtype_bytes)
    active_bytes = sum(size.num_active for size in plain) * dtype_bytes

    def duration(num_bytes: float) -> float:
        return step_duration(num_bytes + head_bytes, model, on_gpu=device == "cuda")

    empty = duration(reads.always)
    return RooflineCost(
        (free_step_tokens or FREE_STEP_TOKENS[device]) * empty / duration(active_bytes),
        expert_time=(duration(reads.total) - empty) / empty,
        chosen_share=reads.chosen,
    )
