"""Messages survive their bytes."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.messages import (
    OutputBatch,
    OutputLogprobs,
    StartItems,
    StartLists,
    StepLogprobs,
    StepPlan,
    StepResult,
    pack,
    pack_inside,
    unpack,
)
from raypp.row_params import DTYPE

DTYPES = {
    "Int32s": np.int32,
    "Int64s": np.int64,
    "Float32s": np.float32,
    "Bools": np.bool_,
    "Bytes": np.uint8,
    "RowParams": DTYPE,
}


def any_array(dtype, shape, rng):
    """Return an array of any bits at all; drawn at once, since hypothesis would draw each element."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)


@st.composite
def messages(draw, cls):
    """Draw a message of a class, whose arrays have any lengths."""
    values, rng = {}, np.random.default_rng(draw(st.integers(0, 2**32)))
    for field in fields(cls):
        if field.type == "int":
            values[field.name] = draw(st.integers(-(2**40), 2**40))
        else:
            has_rows = (field.name == "token_ids" and cls is StepResult) or field.name.endswith("_by_position")
            shape = (draw(st.integers(0, 9)), *([draw(st.integers(1, 4))] if has_rows else []))
            values[field.name] = any_array(DTYPES[field.type], shape, rng)
    return cls(**values)


@pytest.mark.parametrize(
    "cls", [StepPlan, StepResult, OutputBatch, StartLists, StartItems, StepLogprobs, OutputLogprobs]
)
@given(data=st.data())
def test_unpacking_gives_what_was_packed(cls, data):
    message = data.draw(messages(cls))
    again = unpack(cls, memoryview(pack(message)))
    for field in fields(cls):
        before, after = getattr(message, field.name), getattr(again, field.name)
        if field.type == "int":
            assert before == after
        else:
            assert before.dtype == after.dtype
            assert before.tobytes() == after.tobytes()
            assert before.shape == after.shape


def test_an_array_of_another_type_is_a_fault():
    result = StepResult(0, np.zeros((1, 1), np.int64), *[np.ones(1, np.int32)] * 3)
    with pytest.raises(AssertionError, match="token_ids"):
        pack(result)


def test_a_message_inside_of_another_one():
    inner = StepResult(3, np.array([[5]], np.int32), *[np.ones(1, np.int32)] * 3)
    outer = StepResult(4, np.array([[6]], np.int32), *[np.ones(1, np.int32)] * 3, pack_inside(inner))
    assert len(inner.logprobs) == 0
    again = unpack(StepResult, unpack(StepResult, pack(outer)).logprobs.data)
    assert (again.step_id, again.token_ids.tolist()) == (3, [[5]])
