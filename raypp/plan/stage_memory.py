"""What fits into the stages' memory: weights, KV blocks, and the longest request that these hold.

    share of the device = weights + what a step's tensors take + graphs and libraries + states of rows + KV blocks

There are as many KV blocks as the stage with the fewest holds, since all of them use the same block ids. If asked for,
others are kept in the main memory of the stages' machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ResourceError, page
from raypp.models.config import ModelConfig
from raypp.models.sizes import embedding_bytes, layer_sizes, lm_head_bytes, logit_row_bytes, mlp_width, qkv_width
from raypp.ops.expanded_rows import LatentSizes
from raypp.ops.sample.draw_sizes import draw_bytes
from raypp.plan.graph_plan import graph_spec, max_step_rows
from raypp.plan.hardware import Hardware, StageGpus
from raypp.sampling_params import (
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_END_TOKENS,
)
from raypp.scheduler.limits import STEPS_PER_COHORT
from raypp.stage.stage_spec import NUM_PADDING_ROWS

_LIBRARY_BYTES = 1 << 30  # a CUDA context, cuBLAS's and attention's workspaces
_SHORTEST_REQUEST = 2  # tokens
_SAMPLER_ROW_BYTES = 4 * MAX_END_TOKENS + (4 + 4) * MAX_BIASED_TOKENS + 4 * MAX_BAD_WORD_SPELLINGS * MAX_BAD_WORD_TOKENS
_SAMPLER_BITS = 32 + 8 + 1  # by row and token: how often it was generated; whether it is in the prompt, and allowed
_REPORT_BYTES = 16  # per logit while a step reports log-probabilities: copies, and what torch makes on the way
_STAGED_BYTES = 32 << 20
"""What a GPU holds of blocks on their way: enough for a link of 60 GB/s to be busy half a millisecond."""
_INPUT_COPIES = 8  # of the inputs of all layers, while the first stage makes them: products, norms in 32 bits
_BYTES_PER_PLAN = 256 << 20
"""What a stage's plan may bring back beside others' steps: 5 ms of that link, about a decode step of an 8B model, and
mostly beside the steps before."""
_USUAL_LENGTH = 8192
"""Tokens of a request, prompt and output together, by which groups of layers with and without a window share memory."""
_ROWS_PER_SNAPSHOT = 4
_MOST_BLOCKS = 2**31 - 1
_MOST_OF_MEMORY = 0.85
"""Of a machine's main memory: it stays locked, and Ray ends processes where more than 95 % is in use."""


@dataclass(frozen=True)
class BlockMix:
    """How many KV blocks groups of layers get beside each other.

    A group with a window needs no more than its rows keep, however long they become, and room for a step's prompts. It
    gets that for as many rows as the first group, which sees the most, holds of a usual length.

    Args:
        windows: Of the groups, the widest first.
        block_size: Tokens per block.
        most_rows: Requests that run at a time.
        step_tokens: Of one step.
        tokens_ahead: That steps in flight may write of a row.
        usual_length: Tokens of a request.
        most_blocks: Of the first group, where a stage's blocks take no memory: its layers have windows, or states.
    """

    windows: tuple[int | None, ...]
    block_size: int
    most_rows: int
    step_tokens: int
    tokens_ahead: int
    usual_length: int
    most_blocks: int = _MOST_BLOCKS

    @property
    def usual_blocks(self) -> int:
        """Of a request of a usual length, of the first group."""
        return -(-self.usual_length // self.block_size)

    def of(self, num_blocks: int) -> tuple[int, ...]:
        """Return the blocks of each group, null blocks included, where the first has so many."""
        num_rows = min(self.most_rows, (num_blocks - 1) / self.usual_blocks)
        step_blocks = -(-self.step_tokens // self.block_size)
        return (
            num_blocks,
            *(
                min(num_blocks, 1 + math.ceil(num_rows * self.kept(window)) + step_blocks)
                for window in self.windows[1:]
            ),
        )

    def kept(self, window: int | None) -> int:
        """Return the most blocks that a row with a window keeps between two steps."""
        assert window is not None, "there is one group without a window, the first"
        return -(-(window + self.tokens_ahead) // self.block_size) + 1

    def most(self, block_bytes: Sequence[int], num_bytes: int) -> int:
        """Return the largest number of blocks of the first group with which all groups take at most `num_bytes`.

        Below 2 where nothing fits; `block_bytes` has what a block takes, by group.
        """

        def taken(num_blocks: int) -> int:
            return sum(map(mul, self.of(num_blocks), block_bytes))

        low, high = 0, 1
        while taken(high) <= num_bytes:
            low, high = high, 2 * high
            if high > self.most_blocks:
                return self.most_blocks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if taken(middle) <= num_bytes else (low, middle)
        return low

    def longest(self, num_blocks: Sequence[int]) -> int | None:
        """Return the most tokens of a request that is alone; None: any number."""
        held = [
            (count - 1) * self.block_size
            for count, window in zip(num_blocks, self.windows, strict=True)
            if window is None or count - 1 <= self.kept(window)
        ]
        return min(held, default=None)


class CpuKv(NamedTuple):
    """What every stage keeps in CPU memory, besides what is on its device."""

    num_blocks: tuple[int, ...]  # KV blocks, by group
    num_snapshots: int = 0  # of rows' states


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a stage may use of its device's memory, and what takes it, in bytes.

    On a CPU weights, KV cache, tables and images alone are planned.
    """

    device_bytes: int  # of its GPU, or of the machine's main memory; 0: not known
    share_bytes: int  # of these, those that the stage may use
    weight_bytes: int
    step_bytes: int  # a step's tensors, and KV blocks on their way to CPU memory or back
    graph_bytes: int  # recordings of steps, and the buffers around them: an estimate
    library_bytes: int  # a CUDA context and libraries' workspaces: an estimate
    speculation_bytes: int  # tables of known tokens, states that a draft head reads
    item_bytes: int  # embeddings of images, on the first stage
    block_bytes: tuple[int, ...]  # of one KV block, by group of layers
    row_bytes: int = 0  # of one row's states
    num_rows: int = 0  # that have states, padding and snapshots included

    @property
    def state_bytes(self) -> int:
        """Of all rows' states."""
        return self.num_rows * self.row_bytes

    @property
    def taken_bytes(self) -> int:
        """All but the KV cache."""
        fixed = self.weight_bytes + self.step_bytes + self.graph_bytes + self.library_bytes
        return fixed + self.speculation_bytes + self.item_bytes + self.state_bytes

    def kv(self, num_blocks: Sequence[int]) -> int:
        """Return the bytes of that many KV blocks of each group."""
        return sum(map(mul, num_blocks, self.block_bytes))

    def cpu_kv(self, kept: CpuKv) -> int:
        """Return the bytes of KV blocks and snapshots in CPU memory."""
        return self.kv(kept.num_blocks) + kept.num_snapshots * self.row_bytes

    def max_blocks(self, mix: BlockMix) -> int:
        """Return the KV blocks of the first group for which the rest of the share suffices, all groups counted."""
        return mix.most(self.block_bytes, self.share_bytes - self.taken_bytes)


def memory_of_stages(
    config: EngineConfig,
    hardware: Hardware,
    model: ModelConfig,
    *,
    device: str,
    gpus: Sequence[StageGpus],
    dtype_bytes: int,
    weight_bytes: Sequence[int],
    block_bytes: Sequence[Sequence[int]],
    row_bytes: Sequence[int],
    speculation_bytes: Sequence[int],
    item_bytes: int,
) -> tuple[StageMemory, ...]:
    """Return what each stage may use, and what it takes.

    Args:
        config: The shares of a GPU.
        hardware: The memory of a machine without GPUs.
        model: Sizes of a step's tensors.
        device: `cpu` or `cuda`.
        gpus: Of each stage.
        dtype_bytes: Of weights and activations.
        weight_bytes: Of each stage.
        block_bytes: What a KV block of each group takes on each stage.
        row_bytes: What a row's states take on each stage.
        speculation_bytes: What speculation keeps on each stage, weights and KV aside.
        item_bytes: What images take on the first stage.
    """
    share, step_bytes, graph_bytes, library_bytes = 1.0, 0, 0, 0
    device_bytes = [hardware.memory_bytes] * len(gpus)
    if device != "cpu":
        share = config.cache.gpu_memory_utilization * config.parallel.stage_num_gpus
        device_bytes = [of_stage.weakest.memory_bytes for of_stage in gpus]
        step_bytes, library_bytes = _step_bytes(config, model, dtype_bytes), _LIBRARY_BYTES
        graph_bytes = graph_spec(config, model, "cuda", dtype_bytes).planned_bytes
    num_staged = num_staged_blocks(config, block_bytes)
    return tuple(
        StageMemory(
            device_bytes=there,
            share_bytes=int(there * share),
            weight_bytes=weights,
            step_bytes=step_bytes + (0 if device == "cpu" else num_staged * sum(block)),
            graph_bytes=graph_bytes,
            library_bytes=library_bytes,
            speculation_bytes=kept,
            item_bytes=item_bytes if index == 0 else 0,
            block_bytes=tuple(block),
            row_bytes=states,
            num_rows=num_state_rows(config) if any(row_bytes) else 0,
        )
        for index, (there, weights, block, states, kept) in enumerate(
            zip(device_bytes, weight_bytes, block_bytes, row_bytes, speculation_bytes, strict=True)
        )
    )


def stage_weight_bytes(model: ModelConfig, layers: Sequence[int], dtype_bytes: int) -> list[int]:
    """Return the bytes of each stage's weights, a draft head's aside; `layers` says how many layers each has."""
    sizes, ends = layer_sizes(model, dtype_bytes), [0, *accumulate(layers)]
    weight_bytes = [sum(size.weight_bytes for size in sizes[start:end]) for start, end in pairwise(ends)]
    weight_bytes[0] += embedding_bytes(model, dtype_bytes)
    if len(layers) > 1 or not model.tie_word_embeddings:
        weight_bytes[-1] += lm_head_bytes(model, dtype_bytes)
    return weight_bytes


def block_mix(config: EngineConfig, model: ModelConfig) -> BlockMix:
    """Return how many KV blocks the groups of a model's layers get beside each other."""
    longest = config.model.max_model_len or model.max_position_embeddings
    most_steps = config.scheduler.max_steps_per_cohort or STEPS_PER_COHORT + 1
    needed = config.scheduler.max_num_seqs * -(-longest // config.cache.block_size)
    of_prefixes = max(2 * needed + 1, config.cache.num_kv_blocks or 0)
    return BlockMix(
        windows=model.windows,
        block_size=config.cache.block_size,
        most_rows=config.scheduler.max_num_seqs,
        step_tokens=config.scheduler.max_num_batched_tokens,
        tokens_ahead=(most_steps + 1) * (1 + config.speculative.max_drafts),
        usual_length=min(longest, _USUAL_LENGTH),
        most_blocks=_MOST_BLOCKS if model.attending else of_prefixes,
    )


def num_blocks_on_cpu(config: EngineConfig, mix: BlockMix, memory: Sequence[StageMemory]) -> int:
    """Return the KV blocks of every stage, of the first group.

    Args:
        config: `num_kv_blocks`, else `kv_cache_bytes`, says how many.
        mix: Of the groups.
        memory: Of each stage.

    Raises:
        ResourceError: not even one besides the null block.
    """
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    num_blocks = _most_by_cache_bytes(config, mix, memory)
    if num_blocks < 2:
        least = max(stage.kv(mix.of(2)) + stage.state_bytes for stage in memory)
        raise ResourceError(
            "the KV cache is too small for one block",
            got=f"kv_cache_bytes={config.cache.kv_cache_bytes}",
            expected=f"at least {least} (the null block and one more{_and_states(memory)})",
            hint=f"raise kv_cache_bytes or lower block_size{' or num_state_snapshots' if _and_states(memory) else ''}",
        )
    return num_blocks


def _most_by_cache_bytes(config: EngineConfig, mix: BlockMix, memory: Sequence[StageMemory]) -> int:
    """Return the KV blocks of the first group that `kv_cache_bytes` of every stage hold beside the states of rows."""
    room = config.cache.kv_cache_bytes
    return min(mix.most(stage.block_bytes, room - stage.state_bytes) for stage in memory)


def _and_states(memory: Sequence[StageMemory]) -> str:
    largest = max(memory, key=lambda stage: stage.row_bytes)
    if not largest.row_bytes:
        return ""
    return f", and states of {largest.num_rows} rows, snapshots included, each {largest.row_bytes / 2**20:.1f} MiB"


def num_snapshots(config: EngineConfig) -> int:
    """Return how many snapshots of rows' states are kept, of a model whose layers have some."""
    cache = config.cache
    if not cache.enable_prefix_caching:
        return 0
    asked = cache.num_state_snapshots
    return max(1, config.scheduler.max_num_seqs // _ROWS_PER_SNAPSHOT) if asked is None else asked


def num_state_rows(config: EngineConfig) -> int:
    """Return the rows that have states: requests that run, padding, snapshots."""
    return config.scheduler.max_num_seqs + NUM_PADDING_ROWS + num_snapshots(config)


def with_fitting_rows(
    config: EngineConfig,
    model: ModelConfig,
    memory_of: Callable[[EngineConfig], Sequence[StageMemory]],
    *,
    on_gpu: bool,
) -> EngineConfig:
    """Return the configuration with as many running requests as fit with their states and a usual length of KV.

    At most `max_num_seqs`, and at least a request for each stage if that is no more. What steps and graphs take falls
    with the rows, too.

    Args:
        config: What is asked for, without `num_kv_blocks`.
        model: Its layers keep states of rows.
        memory_of: Returns what the stages take with a configuration.
        on_gpu: Where the stages run.
    """

    def at(num_rows: int) -> EngineConfig:
        return config.with_settings(max_num_seqs=num_rows)

    def fits(num_rows: int) -> bool:
        memory, mix = memory_of(at(num_rows)), block_mix(at(num_rows), model)
        if on_gpu:
            num_blocks = min(stage.max_blocks(mix) for stage in memory)
        else:
            num_blocks = _most_by_cache_bytes(config, mix, memory)
        return num_blocks - 1 >= num_rows * mix.usual_blocks

    asked = config.scheduler.max_num_seqs
    low, high = min(asked, config.parallel.num_stages), asked
    if fits(high):
        return config
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return at(low)


def check_main_memory(memory: Sequence[StageMemory], kv_bytes: Sequence[int], num_members: int = 1) -> None:
    """Refuse a stage that a machine without GPUs cannot hold, even if no other stage shares it.

    Args:
        memory: Of each stage; one of unknown size passes.
        kv_bytes: What the KV cache of each takes, with what `cpu_kv_bytes` is for.
        num_members: Of each stage, on one machine; the sizes are those of one.

    Raises:
        ResourceError: says which stage, with the numbers.
    """
    needed = [stage.weight_bytes + stage.state_bytes + kv for stage, kv in zip(memory, kv_bytes, strict=True)]
    stage_index = needed.index(max(needed))
    stage = memory[stage_index]
    if not stage.share_bytes or num_members * needed[stage_index] <= stage.share_bytes:
        return
    times = "" if num_members == 1 else f"{num_members} members with "
    raise ResourceError(
        f"stage {stage_index} does not fit this machine's memory",
        got=f"{stage.share_bytes / 2**30:.2f} GiB",
        expected=f"{times}{needed[stage_index] / 2**30:.2f} GiB: weights {stage.weight_bytes / 2**30:.2f}, "
        f"KV blocks {kv_bytes[stage_index] / 2**30:.2f}, "
        f"states of requests {stage.state_bytes / 2**30:.2f}",
        hint="more stages on more machines, or a smaller num_kv_blocks, kv_cache_bytes or cpu_kv_bytes",
    )


def check_one_machine(memory: Sequence[StageMemory], kv_bytes: Sequence[int]) -> None:
    """Refuse stages that together take more than the one machine without GPUs that they share.

    Args:
        memory: Of each stage; a machine of unknown size passes.
        kv_bytes: What the KV cache of each takes, with what `cpu_kv_bytes` is for.

    Raises:
        ResourceError: with the numbers.
    """
    there = memory[0].device_bytes
    fixed, kv = sum(stage.taken_bytes for stage in memory), sum(kv_bytes)
    if there and fixed + kv > there:
        raise ResourceError(
            "the stages together do not fit this machine's memory",
            got=f"{there / 2**30:.2f} GiB",
            expected=f"{(fixed + kv) / 2**30:.2f} GiB for {len(memory)} stages: weights and what computing keeps "
            f"{fixed / 2**30:.2f}, KV blocks {kv / 2**30:.2f}",
            hint="more machines, in one Ray cluster that RAY_ADDRESS names, a smaller num_kv_blocks, kv_cache_bytes "
            "or cpu_kv_bytes, or a smaller model",
        )


def num_blocks_on_gpus(config: EngineConfig, mix: BlockMix, memory: Sequence[StageMemory]) -> int:
    """Return the KV blocks of every stage, of the first group; `num_kv_blocks` caps them.

    Args:
        config: Says how many are asked for.
        mix: Of the groups.
        memory: Of each stage.

    Raises:
        ResourceError: the memory does not suffice; says for what, with the numbers.
    """
    most = [stage.max_blocks(mix) for stage in memory]
    stage_index = most.index(min(most))
    stage, held = memory[stage_index], most[stage_index]
    asked = config.cache.num_kv_blocks
    if held < max(2, asked or 2):
        raise ResourceError(
            f"stage {stage_index} does not fit its share of a GPU",
            got=f"{stage.share_bytes / 2**30:.2f} GiB of {stage.device_bytes / 2**30:.2f}: "
            f"weights {stage.weight_bytes / 2**30:.2f}, a step's tensors {stage.step_bytes / 2**30:.2f}, "
            f"tables and states of speculation {stage.speculation_bytes / 2**30:.2f}, "
            f"embeddings of images {stage.item_bytes / 2**30:.2f}, "
            f"libraries and graphs {(stage.library_bytes + stage.graph_bytes) / 2**30:.2f}"
            f"{_and_states(memory)}; "
            f"the rest: {max(held, 0)} KV blocks",
            expected=f"at least {asked or 2} KV blocks of {sum(stage.block_bytes)} bytes",
            hint="more stages, a larger stage_num_gpus or gpu_memory_utilization, "
            "or smaller max_num_batched_tokens, max_num_seqs, ngram_window or num_kv_blocks; `raypp info` says what "
            "would fit",
        )
    return asked or held


def longest_request(config: EngineConfig, model: ModelConfig, mix: BlockMix, num_blocks: Sequence[int]) -> int:
    """Return the tokens that a request may have, `max_model_len`.

    Raises:
        ConfigError, ResourceError: what was asked for is more than the model or the KV cache holds.
    """
    held, asked = mix.longest(num_blocks), config.model.max_model_len
    if held is None:
        held = max(asked or 0, model.max_position_embeddings)
    blocks = f"{min(num_blocks)} blocks of {config.cache.block_size} tokens, one of them the null block: {held} tokens"
    if held < _SHORTEST_REQUEST:
        raise ResourceError(
            "the KV cache is too small for any request",
            got=blocks,
            expected=f"{_SHORTEST_REQUEST} tokens: one of a prompt, one of output",
            hint="raise kv_cache_bytes, num_kv_blocks or block_size",
        )
    if asked is None:
        return min(model.max_position_embeddings, held)
    if asked > model.max_position_embeddings:
        raise ConfigError(
            "max_model_len is more than the model was made for",
            got=asked,
            expected=f"at most {model.max_position_embeddings}",
            hint=f"rope_scaling makes it take more, if it was trained for that: {page('long_context')}",
        )
    if asked > held:
        raise ResourceError(
            "the KV cache is too small for one request of max_model_len tokens",
            got=blocks,
            expected=f"{asked} tokens",
            hint=f"set max_model_len={held} or less, or raise kv_cache_bytes (num_kv_blocks)",
        )
    return asked


def _step_bytes(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Return what the largest step's tensors take at once: a layer's widest ones, or the logits and their copies.

    And what choosing tokens keeps: the tables by row, masks, the changed logits, and what draws hand on.
    """
    tokens, num_rows = config.scheduler.max_num_batched_tokens, max_step_rows(config)
    widest = 4 * model.hidden_size + mlp_width(model)
    input_copies = _INPUT_COPIES + (model.vision is not None)  # tokens' stay while those of images are made
    widest += 2 * qkv_width(model) + input_copies * (model.stream_size(0) - model.hidden_size)
    layer_bytes = tokens * widest * dtype_bytes
    most_positions = num_rows * (1 + config.speculative.max_drafts)
    num_logits = min(most_positions, max(tokens, num_rows))
    logits_bytes = num_logits * (logit_row_bytes(model) + model.vocab_rows * _REPORT_BYTES)
    num_table_rows = config.scheduler.max_num_seqs + NUM_PADDING_ROWS
    table_bytes = num_table_rows * (_SAMPLER_ROW_BYTES + model.vocab_size * _SAMPLER_BITS // 8)
    mask_bytes = most_positions * model.vocab_size // 8
    chosen_bytes = table_bytes + mask_bytes + draw_bytes(most_positions, model.vocab_size, model.num_members)
    return max(layer_bytes, logits_bytes) + chosen_bytes + expanded_bytes(config, model, dtype_bytes)


def expanded_bytes(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Return what a GPU keeps for prompts' latents and what is expanded of them; 0 of a model without latents."""
    longest = config.model.max_model_len or model.max_position_embeddings
    sizes = [
        LatentSizes(each.latent.width * dtype_bytes, (each.head_dim + each.v_dim) * dtype_bytes)
        for each in model.attending
        if each.latent is not None
    ]
    return max((of_layer.planned(longest) for of_layer in sizes), default=0)


_BLOCKS_OF_NOTHING = 8
"""In CPU memory for each on the device, where blocks take no memory."""


def plan_cpu_kv(config: EngineConfig, memory: Sequence[StageMemory], num_blocks: Sequence[int]) -> CpuKv:
    """Return what every stage keeps in CPU memory: KV blocks of groups in the proportion of those on the device.

    Where layers keep states, snapshots get half of the bytes. A prompt needs both, and which of them are more for a
    turn of a conversation depends on its length: either half holds at least half as much as it would alone. Where no
    layer has KV, snapshots get all, and blocks, which take nothing, are a multiple of those on the device.

    Args:
        config: `cpu_kv_bytes` says how much.
        memory: Of each stage.
        num_blocks: On the device, by group.

    Raises:
        ResourceError: not even one block, or one snapshot.
    """
    num_bytes, row_bytes = config.cache.cpu_kv_bytes, max(stage.row_bytes for stage in memory)
    most = max(stage.kv(num_blocks) for stage in memory)
    num_shares = 2 if row_bytes and most else 1
    share = num_bytes // num_shares
    blocks = [share * count // most if most else _BLOCKS_OF_NOTHING * count * (num_bytes > 0) for count in num_blocks]
    kept = CpuKv(tuple(blocks), share // row_bytes if row_bytes else 0)
    if num_bytes and not (all(kept.num_blocks) and (kept.num_snapshots or not row_bytes)):
        largest = num_shares * max(row_bytes, *(sum(stage.block_bytes) for stage in memory))
        raise ResourceError(
            f"cpu_kv_bytes is too small for one KV block{' and one snapshot of states' if row_bytes else ''}",
            got=f"cpu_kv_bytes={num_bytes}",
            expected=f"at least {largest}, or 0 for none",
            hint="raise cpu_kv_bytes or lower block_size",
        )
    return kept


def num_staged_blocks(config: EngineConfig, block_bytes: Sequence[Sequence[int]]) -> int:
    """Return the blocks of each group that every stage copies at a time; 0 without any in CPU memory."""
    largest = max(map(sum, block_bytes))
    if not largest:
        return min(config.cache.cpu_kv_bytes, 1)
    return min(config.cache.cpu_kv_bytes // largest, max(1, _STAGED_BYTES // largest))


def max_copied_blocks(block_bytes: Sequence[Sequence[int]]) -> int:
    """Return the most blocks that a plan brings back while others run."""
    return max(1, _BYTES_PER_PLAN // max(1, *map(max, block_bytes)))


def check_cpu_memory(
    config: EngineConfig, hardware: Hardware, cpu_kv_bytes: Sequence[int], num_members: int = 1
) -> None:
    """Refuse blocks and snapshots that a machine with GPUs has no main memory for.

    Args:
        config: Where the stages are to run.
        hardware: The main memory of a machine; 0, if not known, passes.
        cpu_kv_bytes: What they take of each stage, or of a member of it.
        num_members: Of each stage, on one machine.

    Raises:
        ResourceError: says how much stages that are on one machine need together.
    """
    together = cpu_kv_bytes if _share_a_machine(config, hardware) else [max(cpu_kv_bytes)]
    needed, there = num_members * sum(together), hardware.memory_bytes
    if not there or needed <= _MOST_OF_MEMORY * there:
        return
    raise ResourceError(
        "the KV blocks in CPU memory do not fit the machine",
        got=f"{there / 2**30:.2f} GiB of main memory",
        expected=f"{needed / 2**30:.2f} GiB for those of {len(together)} of {len(cpu_kv_bytes)} stages to be at most "
        f"{_MOST_OF_MEMORY:.0%} of it",
        hint="lower cpu_kv_bytes; it is for each stage, and for each member of one",
    )


def _share_a_machine(config: EngineConfig, hardware: Hardware) -> bool:
    """Return whether all stages are certain to be on one machine."""
    parallel = config.parallel
    if parallel.placement == "strict_pack":
        return True
    num_asked = parallel.num_stages * parallel.tensor_parallel_size * parallel.stage_num_gpus
    return parallel.placement == "pack" and hardware.num_machines == 1 and num_asked <= hardware.num_gpus
