"""Where the tensors of a message lie, and what happens when two ends see it differently."""

from __future__ import annotations

import pytest
import torch

from raypp.errors import ConfigError
from raypp.transport.schema import Schema, TensorSpec, check_schemas, feedback_schema, hidden_states_schema


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (3, 17), (8, 8)])
def test_views_hold_what_was_written_and_do_not_overlap(dtype: torch.dtype, num_rows: int, num_tokens: int) -> None:
    schema = hidden_states_schema(20, dtype)
    buffer = torch.zeros(schema.num_bytes(num_rows, num_tokens), dtype=torch.uint8)
    written = {
        "num_computed_tokens": torch.arange(num_rows, dtype=torch.int32) - 1,
        "hidden_states": torch.randn(num_tokens, 20).to(dtype),
    }
    for name, view in schema.views(buffer, num_rows, num_tokens).items():
        assert view.data_ptr() % 16 == buffer.data_ptr() % 16, f"{name} is not aligned"
        view.copy_(written[name])
    for name, view in schema.views(buffer, num_rows, num_tokens).items():
        assert torch.equal(view, written[name]), name


def test_sizes_are_padded_per_tensor() -> None:
    schema = feedback_schema(max_drafts=2)
    # Per row: length 4 bytes, 3 tokens 12 bytes, 2 drafts 8 bytes; each tensor padded to 16.
    assert schema.num_bytes(1, 99) == 16 + 16 + 16
    assert schema.num_bytes(5, 99) == 32 + 64 + 48
    assert schema.num_bytes(0, 99) == 0


def test_no_drafts_make_an_empty_view() -> None:
    schema = feedback_schema(max_drafts=0)
    buffer = torch.zeros(schema.num_bytes(4, 4), dtype=torch.uint8)
    assert schema.views(buffer, 4, 4)["draft_ids"].shape == (4, 0)


def test_equal_schemas_pass() -> None:
    lines = hidden_states_schema(8, torch.float32).describe()
    check_schemas("stage 0", lines, "stage 1", list(lines))


@pytest.mark.parametrize(
    "other",
    [
        hidden_states_schema(16, torch.float32),
        hidden_states_schema(8, torch.bfloat16),
        Schema((TensorSpec("hidden_states", torch.float32, (8,), "token"),)),
        Schema(tuple(reversed(hidden_states_schema(8, torch.float32).specs))),
    ],
    ids=["shape", "dtype", "keys", "order"],
)
def test_different_schemas_name_both_sides(other: Schema) -> None:
    with pytest.raises(ConfigError, match="stage 3 and stage 4") as caught:
        check_schemas("stage 3", hidden_states_schema(8, torch.float32).describe(), "stage 4", other.describe())
    assert "stage 3 sends" in str(caught.value)
    assert "stage 4 expects" in str(caught.value)
