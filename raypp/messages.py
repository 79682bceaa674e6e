"""The messages of the per-step path, and how they become bytes.

Every message is one frozen dataclass of integers and numpy arrays (a struct of arrays, never a list of objects). `pack`
writes it without pickle: a fixed header, then each array's bytes, 8-byte aligned. `unpack` makes views into the
received bytes; they are read-only.

What most steps do not carry is a message of its own inside of another one: an array of its packed bytes, mostly empty.

R rows in the step, S rows that start, B new block-table entries, K drafts per decode row, N requests in a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from raypp import row_params
from raypp.row_params import RowParams

NULL_BLOCK = 0
"""The KV block that no request owns: padding and positions past a row's limit write there."""

NO_STEP = -1
"""A `step_id` that never was."""

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

NO_INT32S: Int32s = np.empty(0, np.int32)
NO_INT32S.flags.writeable = False
NO_BYTES: Bytes = np.empty(0, np.uint8)
"""Instead of a message inside of another one."""
NO_BYTES.flags.writeable = False


@dataclass(frozen=True)
class BlockGroup:
    """KV blocks of the layers that keep the same tokens: they share block tables, and block ids on every stage."""

    num_blocks: int  # of every stage, the null block included; that one is never handed out
    window: int | None = None  # tokens that a query sees, its own included; None: all before it
    num_cpu_blocks: int = 0  # that every stage keeps in CPU memory, beside those
    block_bytes: int = 0  # of a block on all stages together; for reports alone


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step, ordered by the driver: the same bytes for every stage. Only deltas, and arrays over the step's rows.

    Decode rows come first, then prefill rows. A decode row's inputs (its last token, its drafts, its length) are known
    to the stages alone; the plan gives an upper bound of its length. A prefill row's are known to the driver.
    """

    step_id: int  # consecutive from 0
    cohort: int  # whose decode rows these are
    num_drafts: int  # K: drafts that each decode row verifies
    requires_feedback_of: int  # the newest step that must have been fed back before this one; NO_STEP if none
    num_decode_rows: int
    num_item_tokens: int  # of the prefill rows' tokens, those that stand for images; see `StartItems`
    rows: Int32s  # [R]
    num_scheduled_tokens: Int32s  # [R] decode rows: 1 + K
    num_computed_tokens: Int32s  # [R] before this step; exact for prefill rows, an upper bound for decode rows
    samples: Bools  # [R] whether the row may yield tokens: decode rows, and the last chunk of a prefill
    drafting: Bools  # [R] whether a draft head must see the row's hidden states; empty when it must see all

    start_rows: Int32s  # [S] rows that a request takes over with this step
    start_prompt_lens: Int32s  # [S]
    start_limits: Int32s  # [S] min(prompt + max_tokens, max_model_len): the row ends before this position
    start_num_tokens: Int32s  # [S] known tokens: the prompt, and after a preemption the output so far
    start_token_ids: Int32s  # [sum of start_num_tokens]
    start_params: RowParams  # [S] see `raypp.row_params`
    start_lists: Bytes  # a packed `StartLists` when any of these rows has lists among its sampling parameters
    start_items: Bytes  # a packed `StartItems` when any of these rows has more than text in its prompt

    block_groups: Int32s  # [B] whose block table, by the engine's groups of layers
    block_rows: Int32s  # [B] row
    block_positions: Int32s  # [B] index into the row's block table
    block_ids: Int32s  # [B] KV block
    block_copies: Bytes  # a packed `BlockCopies` when KV blocks move between the device and CPU memory

    # How long the last stage may hold the step up for the masks of rows under a grammar; other rows are not to wait.
    max_mask_wait_us: int = 0

    state_copies: Bytes = field(
        default_factory=lambda: NO_BYTES
    )  # a packed `StateCopies` when states of rows are copied


@dataclass(frozen=True, eq=False)
class StateCopies:
    """States of rows that every stage copies before a step: first S rows to snapshots, then N snapshots to rows."""

    saved_rows: Int32s  # [S] as the steps before left them
    saved_snapshots: Int32s  # [S] all differ
    restored_snapshots: Int32s  # [N]
    restored_rows: Int32s  # [N] of those that start with the step


@dataclass(frozen=True, eq=False)
class BlockCopies:
    """KV blocks that every stage copies before a step: first O of them to CPU memory, then I of them from there.

    The step, and all after it, come behind the copies. These need not wait for all steps before: no step after
    `after_step` reads or writes any of the device blocks.

    Behind the groups of KV blocks comes one more, whose blocks are snapshots of states. They are copied before what
    `StateCopies` orders.
    """

    after_step: int  # NO_STEP: no step does
    out_groups: Int32s  # [O] whose blocks
    out_block_ids: Int32s  # [O] KV blocks, whose content the step may overwrite
    out_cpu_block_ids: Int32s  # [O] where they go; all of a group differ
    in_groups: Int32s  # [I] whose blocks
    in_block_ids: Int32s  # [I] KV blocks that are overwritten; all of a group differ
    in_cpu_block_ids: Int32s  # [I] what with


@dataclass(frozen=True, eq=False)
class StartLists:
    """Lists among the sampling parameters of the rows that start with a plan, one row after the other.

    How many entries are a row's, `StepPlan.start_params` says.
    """

    end_token_ids: Int32s
    bias_token_ids: Int32s
    bias: Float32s
    allowed_token_ids: Int32s
    bad_word_lens: Int32s
    bad_word_token_ids: Int32s


class MaskMoment(IntEnum):
    """The columns of `MaskUpdate.moments`."""

    START_STEP = 0  # the step with which the request took the row over
    AFTER_STEP = 1  # the newest of the row's steps whose tokens are taken into account
    POSITION = 2  # absolute, of the token that the first mask is for
    NUM_MASKS = 3  # at least 1


@dataclass(frozen=True, eq=False)
class MaskUpdate:
    """Which tokens the grammars of G rows allow next, from the driver to the last stage.

    A row's masks are for one position of its text, and for the drafts behind it: mask j + 1 is what the grammar allows
    once draft j was accepted. The stage compares both with what is true. So a mask that comes late, or for drafts that
    are none any more, changes nothing: the row yields as many tokens as it has masks for, none without any.
    """

    rows: Int32s  # [G]
    moments: Int64s  # [G, 4] what the row's masks are for, see `MaskMoment`
    draft_ids: Int32s  # [sum of num_masks - 1]
    bitmasks: Int32s  # [sum of num_masks, ceil(V / 32)] token t is bit t % 32 of word t // 32


@dataclass(frozen=True, eq=False)
class StartItems:
    """Pictures in the prompts of E of the rows that start with a plan, see `raypp.prompt_items`.

    The first stage holds the embeddings of every item whose tokens a plan has it compute: the driver waited for that
    before it dispatched the plan, and lets go of them once the last such plan is collected.
    """

    rows: Int32s  # [E]
    position_offsets: Int32s  # [E] rotary position of a token after the prompt, minus its index
    num_positions: Int32s  # [E] prompt tokens
    rope_positions: Int32s  # [sum of num_positions, 3] time, height, width
    num_items: Int32s  # [E]
    item_starts: Int32s  # [sum of num_items] index of an item's first token in its row
    item_lens: Int32s  # [sum of num_items] its tokens
    item_keys: Bytes  # [sum of num_items, ITEM_KEY_BYTES]


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step yielded, from the last stage to the driver."""

    step_id: int
    token_ids: Int32s  # [R, K + 1] valid up to num_valid
    # [R] tokens that the row yielded; 0 for prefill chunks that are not the last, and for rows without their mask
    num_valid: Int32s
    # With speculation, else empty: [R] drafts, not counting misses, that were compared with the model's own tokens (at
    # K = 0 the first may still be, as a shadow; else empty); and how many leading ones of them are equal.
    num_drafted: Int32s = field(default_factory=lambda: NO_INT32S)
    num_matched: Int32s = field(default_factory=lambda: NO_INT32S)
    logprobs: Bytes = field(default_factory=lambda: NO_BYTES)  # a packed `StepLogprobs` when any row asks for them
    draft_ids: Int32s = field(default_factory=lambda: NO_INT32S)  # [R, K_max] next drafts, if any row has a grammar


@dataclass(frozen=True, eq=False)
class StepLogprobs:
    """Log-probabilities of a step's tokens. L and M: the most that any of its rows asks for.

    Column 0 is the token itself, the others the most likely tokens, best first.
    """

    indices: Int32s  # which of the step's rows; each has 1 + K positions if it decodes, else 1
    token_ids: Int32s  # [sum of positions, 1 + L]
    logprobs: Float32s  # [sum of positions, 1 + L]
    ranks: Int32s  # [sum of positions] of the token itself; 1 is the most likely
    prompt_indices: Int32s  # which of the step's rows
    prompt_starts: Int32s  # position of the first prompt token that is reported
    prompt_counts: Int32s  # consecutive prompt tokens that are
    prompt_token_ids: Int32s  # [sum of prompt_counts, 1 + M]
    prompt_logprobs: Float32s  # [sum of prompt_counts, 1 + M]
    prompt_ranks: Int32s  # [sum of prompt_counts]


class TokenLogprobs(NamedTuple):
    """Log-probabilities of n tokens: in column 0 of the token itself, then of the L most likely ones."""

    token_ids: Int32s  # [n, 1 + L]
    logprobs: Float32s  # [n, 1 + L]
    ranks: Int32s  # [n] of the token itself; 1 is the most likely


class Unrecorded(IntEnum):
    """Why a step of a stage that makes CUDA graphs ran without one."""

    ROWS = 0  # every row decodes, and there is no graph for so many rows with so many drafts
    TOKENS = 1  # it has prompts, and more tokens than the largest graph
    CHOICE = 2  # its layers were a graph, but there is none for what its rows ask of the choice of tokens


class StepForm(IntEnum):
    """How a stage ran the layers of a step."""

    EAGER = 0  # operation by operation
    PIECEWISE = 1  # CUDA graphs, but for attention
    FULL_GRAPH = 2  # one CUDA graph


@dataclass(frozen=True, eq=False)
class StageReport:
    """What a stage did since its last report, and since its start. Rides on heartbeats."""

    num_steps: int  # executed since the start
    busy_ns: int  # time in forwards since the start
    copy_wait_ns: int  # time that steps waited for KV blocks on their way to CPU memory or back, since the start
    step_ids: Int64s  # [S] of the forwards since the last report
    start_us: Int64s  # [S] microseconds since the epoch
    end_us: Int64s  # [S]
    forms: Int64s  # [S] StepForm
    num_unrecorded: Int64s  # [len(Unrecorded)] steps since the start


@dataclass(frozen=True, eq=False)
class OutputBatch:
    """What one step brought to the requests of one client, from the driver to that client."""

    handles: Int64s  # [N] the client's own number of the request
    num_tokens: Int32s  # [N] new tokens
    token_ids: Int32s  # [sum of num_tokens]
    finish_reasons: Int32s  # [N] FinishReason
    stop_token_ids: Int32s  # [N] the stop token that ended it, or -1
    num_cached_tokens: Int32s  # [N] of the prompt, when its first engine admitted it; 0 from others
    num_preemptions: Int32s  # [N]
    queue_us: Int32s  # [N] from arrival at the driver to the first row, microseconds; likewise
    drafted_by_position: Int32s  # [N, K_max] drafts verified so far, by place; at least one column
    accepted_by_position: Int32s  # [N, K_max] of these, the accepted ones
    logprobs: Bytes = field(
        default_factory=lambda: NO_BYTES
    )  # a packed `OutputLogprobs` when any request asks for them


@dataclass(frozen=True, eq=False)
class OutputLogprobs:
    """Log-probabilities of an `OutputBatch`, one request after the other; see `TokenLogprobs`.

    A request of width 1 + L has L most likely tokens beside the token itself; columns behind its width are not its own.
    """

    counts: Int32s  # [N] new tokens that are reported
    widths: Int32s  # [N]
    token_ids: Int32s  # [sum of counts, most of widths]
    logprobs: Float32s  # [sum of counts, most of widths]
    ranks: Int32s  # [sum of counts]
    prompt_counts: Int32s  # [N] prompt tokens that are reported, in order
    prompt_widths: Int32s  # [N]
    prompt_token_ids: Int32s  # [sum of prompt_counts, most of prompt_widths]
    prompt_logprobs: Float32s  # [sum of prompt_counts, most of prompt_widths]
    prompt_ranks: Int32s  # [sum of prompt_counts]


Message = TypeVar("Message")

_DTYPES: dict[Any, np.dtype[Any]] = {
    Int32s: np.dtype("<i4"),
    Int64s: np.dtype("<i8"),
    Float32s: np.dtype("<f4"),
    Bools: np.dtype("?"),
    RowParams: row_params.DTYPE,
    Bytes: np.dtype("u1"),
}


class _Layout:
    """How a message class is written: the scalars, each array's extents (0 columns: one dimension), then the data."""

    def __init__(self, cls: type[Any]) -> None:
        hints = get_type_hints(cls)
        names = [f.name for f in fields(cls)]
        self.scalars = tuple(name for name in names if hints[name] is int)
        self.arrays = tuple((name, _DTYPES[hints[name]]) for name in names if hints[name] is not int)
        self.header = struct.Struct(f"<{len(self.scalars)}q{2 * len(self.arrays)}i")
        # Every field, as it is in a message without any data.
        self.without_data: dict[str, Any] = dict.fromkeys(names) | {
            name: np.empty(0, dtype) for name, dtype in self.arrays
        }


_layout_of: Callable[[Any], _Layout] = cache(_Layout)


def pack(message: Any) -> bytes:
    """Return the message's bytes: scalars and extents, then each array's data, padded to 8 bytes."""
    layout, fields_of = _layout_of(type(message)), vars(message)
    values = list(map(fields_of.__getitem__, layout.scalars))
    parts = [b""]
    for name, dtype in layout.arrays:
        array = fields_of[name]
        assert array.dtype == dtype, f"{name} is {array.dtype}"
        shape = array.shape
        values.append(shape[0])
        values.append(shape[1] if len(shape) > 1 else 0)
        if array.size:
            data = array.tobytes()
            parts.append(data)
            if tail := len(data) % 8:
                parts.append(bytes(8 - tail))
    parts[0] = layout.header.pack(*values)
    return b"".join(parts)


def unpack(cls: type[Message], data: bytes | memoryview) -> Message:
    """Return the message that `pack` wrote. Its arrays are read-only views into `data`."""
    layout = _layout_of(cls)
    header = layout.header.unpack_from(data)
    values = layout.without_data.copy()
    values.update(zip(layout.scalars, header, strict=False))
    offset = layout.header.size
    extents = header[len(layout.scalars) :]
    for (name, dtype), rows, columns in zip(layout.arrays, extents[::2], extents[1::2], strict=True):
        if rows or columns:
            count = rows * columns if columns else rows
            array = np.frombuffer(data, dtype, count, offset)
            values[name] = array.reshape(rows, columns) if columns else array
            offset += -(-count * dtype.itemsize // 8) * 8
    message = object.__new__(cls)
    message.__dict__.update(values)  # as the constructor would, without a call for every field
    return message


def int32s(values: Sequence[int]) -> Int32s:
    """Return numbers as a message carries them."""
    return np.array(values, np.int32)


def pack_inside(message: Any) -> Bytes:
    """Return the message's bytes as an array, to be carried by another message."""
    return np.frombuffer(pack(message), np.uint8)
