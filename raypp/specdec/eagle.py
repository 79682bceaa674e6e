"""The EAGLE proposer: a head drafts token after token from the target's hidden states; see `raypp.models.draft_head`.

    follow    every token of the step enters the head: states -> keys and values, in the head's own cache
    propose   once per draft: attention of each row's newest token, guess the next one, and let that enter too

The head's cache has the target's blocks and block tables. What it holds at position p depends on the token at p + 1 as
well, so the scheduler shares a block only between texts that also agree on the token after it.
"""

from __future__ import annotations

import torch

from raypp.models.draft_head import DraftHead, Entered
from raypp.ops.attention import AttentionBatch, Rotation
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_inputs import NewEntries, Queries, row_inputs
from raypp.ops.row_tokens import StepTokens
from raypp.specdec.proposer import Drafts, Followed, StepHidden


class EagleProposer:
    """Drafts by a head.

    Args:
        head: With its weights.
        cache: The head's own.
        block_tables: Of all rows, int32 [1, max_num_seqs, W]; kept current elsewhere.
        num_drafts: K_max.
        max_len: The most tokens of a row, drafts included.
    """

    has_own_graphs = True

    def __init__(
        self, head: DraftHead, cache: LayerCache, block_tables: torch.Tensor, *, num_drafts: int, max_len: int
    ) -> None:
        self._head = head
        self._cache = cache
        self._block_tables = block_tables
        self._num_drafts = num_drafts
        self._max_len = max_len
        device, max_rows = block_tables.device, block_tables.shape[1]
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._no_entries = NewEntries(nothing, nothing, nothing)
        self._row_numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._draft_numbers = torch.arange(1, num_drafts + 1, dtype=torch.int32, device=device).unsqueeze(1)

    def follow(self, tokens: StepTokens, hidden: StepHidden) -> Followed:
        """Let the step's tokens enter; return what the newest one of each row has become, ready for attention."""
        head = self._head
        entered = head.enter(head.states(hidden.hidden_states, hidden.aux), _next_token_ids(tokens, hidden))
        head.append(entered.qkv, head.rotation(hidden.positions), self._cache, hidden.slot_mapping)
        newest = _newest_indices(tokens, hidden)
        return tuple(each.index_select(0, newest) for each in (entered.residual, entered.qkv, hidden.positions))

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> Drafts:
        """Return `most` drafts, each of which takes a pass of the head; the ids behind them mean nothing."""
        residual, qkv, newest = followed
        head, entered, draft_ids = self._head, Entered(residual, qkv), []
        num_rows = len(tokens.rows)
        if not num_rows:  # a step of chunks alone, none of them a prompt's last
            none = torch.empty(0, self._num_drafts, dtype=torch.int32, device=tokens.rows.device)
            return Drafts(none, none[:, 0])
        # A row of n tokens has entered up to position n - 2: with the state there, and its last token. One whose mask
        # came too late has entered n - 1 with a wrong token; its drafts are too, and nothing before is written again.
        num_computed_tokens = newest.to(torch.int32)
        inputs = row_inputs(
            self._block_tables,
            self._no_entries,
            tokens.rows,
            num_computed_tokens,
            Queries(self._row_numbers[: num_rows + 1] * most, num_rows * most, most),
            block_size=self._cache.keys.shape[2],
            max_len=self._max_len,
        )
        # Of all drafts at once: what belongs to the first one of every row, then to the second, ...
        positions, slots = (
            each.view(num_rows, -1).t().contiguous() for each in (inputs.positions, inputs.slot_mappings[0])
        )
        seq_lens = (num_computed_tokens + self._draft_numbers[:most]).clamp_(max=self._max_len)
        rotation = head.rotation(positions.view(-1))
        for index in range(most):
            attention = AttentionBatch(
                num_decode_rows=num_rows,
                decode_query_len=1,
                seq_lens=seq_lens[index],
                block_tables=inputs.block_tables,
                slot_mappings=[slots[index]],
                prefill_query_lens=[],
                prefill_seq_lens=[],
            )
            of_rows = slice(index * num_rows, (index + 1) * num_rows)
            rope = Rotation(rotation.cos[of_rows], rotation.sin[of_rows])
            states, token_ids = head.finish(entered, rope, self._cache, attention)
            draft_ids.append(token_ids)
            if index + 1 < most:
                entered = head.enter(states, token_ids)
        draft_ids += draft_ids[:1] * (self._num_drafts - most)
        return Drafts(torch.stack(draft_ids, 1), torch.full_like(num_computed_tokens, most))


def _newest_indices(tokens: StepTokens, hidden: StepHidden) -> torch.Tensor:
    """Return where among the step's tokens each row's newest one with a state stands, int64 [Y]."""
    width, indices = tokens.token_ids.shape[1], hidden.token_indices
    if width == 1:
        return indices
    assert tokens.num_valid is not None
    num_decode_tokens = hidden.num_decode_rows * width
    first = indices[:num_decode_tokens:width]
    if len(indices) > num_decode_tokens:
        first = torch.cat((first, indices[num_decode_tokens:]))
    return first + (tokens.num_valid - 1).clamp(min=0)  # a row whose mask came too late yields nothing


def _next_token_ids(tokens: StepTokens, hidden: StepHidden) -> torch.Tensor:
    """Return the token after each of the step's tokens, int32 [T]; behind a refused draft it means nothing."""
    num_decode_rows, known = hidden.num_decode_rows, hidden.next_token_ids
    chosen = tokens.token_ids[:num_decode_rows].reshape(-1)
    if num_decode_rows < len(tokens.rows):
        chosen = torch.cat((chosen, tokens.token_ids[num_decode_rows:, 0]))
    return chosen if known is None else known.index_copy(0, hidden.token_indices, chosen)
