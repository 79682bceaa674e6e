"""The messages of the per-step path, and how they become bytes.

Every message is one frozen dataclass of integers and numpy arrays (a struct of arrays, never a list of objects). `pack`
writes it without pickle: a fixed header, then each array's bytes, 8-byte aligned. `unpack` makes views into the
received bytes; they are read-only.

R rows in the step, S rows that start, B new block-table entries, K drafts per decode row, N requests in a batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0
"""The KV block that no request owns: padding and positions past a row's limit write there."""

NO_STEP = -1
"""A `step_id` that never was."""

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


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
    rows: Int32s  # [R]
    num_scheduled_tokens: Int32s  # [R] decode rows: 1 + K
    num_computed_tokens: Int32s  # [R] before this step; exact for prefill rows, an upper bound for decode rows
    samples: Bools  # [R] whether the row yields tokens: decode rows, and the last chunk of a prefill

    start_rows: Int32s  # [S] rows that a request takes over with this step
    start_prompt_lens: Int32s  # [S]
    start_limits: Int32s  # [S] min(prompt + max_tokens, max_model_len): no KV at or past this position
    start_num_tokens: Int32s  # [S] known tokens: the prompt, and after a preemption the output so far
    start_token_ids: Int32s  # [sum of start_num_tokens]
    start_temperature: Float32s  # [S] 0 means greedy
    start_top_p: Float32s  # [S]
    start_top_k: Int32s  # [S] 0 means all
    start_min_p: Float32s  # [S]
    start_seed: Int64s  # [S]

    block_rows: Int32s  # [B] row
    block_positions: Int32s  # [B] index into the row's block table
    block_ids: Int32s  # [B] KV block


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step yielded, from the last stage to the driver."""

    step_id: int
    token_ids: Int32s  # [R, K + 1] valid up to num_valid
    num_valid: Int32s  # [R] tokens that the row yielded; 0 for prefill chunks that are not the last
    num_accepted: Int32s  # [R] drafts among them


@dataclass(frozen=True, eq=False)
class OutputBatch:
    """What one step brought to the requests of one client, from the driver to that client."""

    handles: Int64s  # [N] the client's own number of the request
    num_tokens: Int32s  # [N] new tokens
    token_ids: Int32s  # [sum of num_tokens]
    finish_reasons: Int32s  # [N] FinishReason
    stop_token_ids: Int32s  # [N] the stop token that ended it, or -1
    num_cached_tokens: Int32s  # [N]
    num_preemptions: Int32s  # [N]
    num_draft_tokens: Int32s  # [N]
    num_accepted_tokens: Int32s  # [N]


Message = TypeVar("Message")

_DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(t) for t in ("<i4", "<i8", "<f4", "?", "<u4"))
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ARRAY_HEADER = struct.Struct("<iiii")  # dtype code, dimensions, the two extents


_Layout = tuple[tuple[str, ...], tuple[str, ...], struct.Struct]
_layouts: dict[type[Any], _Layout] = {}


def _layout(cls: type[Any]) -> _Layout:
    """Return a message's scalar fields, its array fields, and the header that holds the scalars."""
    if (known := _layouts.get(cls)) is not None:
        return known
    hints = get_type_hints(cls)
    names = tuple(f.name for f in fields(cls))
    scalars = tuple(n for n in names if hints[n] is int)
    layout = scalars, tuple(n for n in names if hints[n] is not int), struct.Struct(f"<{len(scalars)}q")
    _layouts[cls] = layout
    return layout


def pack(message: Any) -> bytes:
    """Return the message's bytes: scalars, then per array a header and its data padded to 8 bytes."""
    scalars, arrays, header = _layout(type(message))
    parts = [header.pack(*[getattr(message, n) for n in scalars])]
    for name in arrays:
        array = getattr(message, name)
        shape = array.shape
        parts.append(
            _ARRAY_HEADER.pack(_DTYPE_CODES[array.dtype], len(shape), shape[0], shape[1] if len(shape) > 1 else 1)
        )
        data = array.tobytes()
        parts.append(data)
        if tail := len(data) % 8:
            parts.append(bytes(8 - tail))
    return b"".join(parts)


def unpack(cls: type[Message], data: bytes | memoryview) -> Message:
    """Return the message that `pack` wrote. Its arrays are read-only views into `data`."""
    scalars, arrays, header = _layout(cls)
    values: dict[str, Any] = dict(zip(scalars, header.unpack_from(data), strict=True))
    offset = header.size
    for name in arrays:
        code, ndim, rows, columns = _ARRAY_HEADER.unpack_from(data, offset)
        offset += _ARRAY_HEADER.size
        count, dtype = rows * columns, _DTYPES[code]
        array = np.frombuffer(data, dtype, count, offset) if count else np.empty(0, dtype)
        values[name] = array.reshape(rows, columns) if ndim == 2 else array
        offset += -(-count * dtype.itemsize // 8) * 8
    return cls(**values)
