"""What speculation takes, decided before anything starts: the width of the token table, and who chooses K."""

from __future__ import annotations

from raypp.config.engine import EngineConfig
from raypp.driver.hardware import Hardware
from raypp.errors import ResourceError
from raypp.models.config import ModelConfig
from raypp.scheduler.adaptive_drafts import AdaptiveDrafts, RooflineCost
from raypp.scheduler.draft_policy import DraftPolicy, FixedDrafts
from raypp.specdec.token_table import token_table_bytes
from raypp.stage.spec import NUM_PADDING_ROWS

_MAX_DEFAULT_WINDOW = 32768
_WINDOW_MULTIPLE = 16  # tokens, so that a GPU reads every row of the table 16 bytes at a time
_FREE_STEP_TOKENS = {"cuda": 184, "cpu": 12}  # measured: docs/design/0051-how-many-drafts.md


def ngram_window(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens of a row that the token table keeps; 0 without speculation."""
    if config.speculative.method is None:
        return 0
    longest = config.model.max_model_len or model.max_position_embeddings
    window = min(config.speculative.ngram_window or _MAX_DEFAULT_WINDOW, longest)
    return -(-window // _WINDOW_MULTIPLE) * _WINDOW_MULTIPLE


def table_bytes(config: EngineConfig, window: int) -> int:
    """Return the bytes of the last stage's token table, the rows for padding included."""
    return token_table_bytes(config.scheduler.max_num_seqs + NUM_PADDING_ROWS, window)


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
    if not needed or not hardware.memory_bytes or needed <= left:
        return
    rows = config.scheduler.max_num_seqs + NUM_PADDING_ROWS
    raise ResourceError(
        "the token table of speculation does not fit into the last stage's memory",
        got=f"{needed:,} bytes: {rows:,} rows of {window:,} tokens of 4 bytes",
        expected=f"at most {left:,} bytes: weights and KV cache take {other_bytes:,} of {hardware.memory_bytes:,}",
        hint=f"set ngram_window={left // token_table_bytes(rows, 1)} or less, or lower max_num_seqs",
    )


def draft_policy(config: EngineConfig, device: str) -> DraftPolicy:
    """Return who chooses the number of drafts of each step."""
    given = config.speculative
    if given.method is None or given.num_speculative_tokens is not None:
        return FixedDrafts(given.max_drafts)
    free_tokens = given.free_step_tokens or _FREE_STEP_TOKENS[device]
    return AdaptiveDrafts(given.ladder, config.parallel.num_stages, RooflineCost(free_tokens))
