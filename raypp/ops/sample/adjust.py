"""Changes logits before a token is chosen: bias, penalties, bans, allowed tokens, masks.

    logits --> bias --> penalties --> bans --> allowed tokens --> masks --> changed logits

A row that asks for nothing keeps its logits, bit by bit, whatever other rows ask for: so rows with different parameters
share a call. No function waits for the device, and the host knows all shapes, so a CUDA graph can hold each of them.
Those that return nothing change float32 logits in place. `raypp.ops.cuda.adjust_kernel` does the same in one launch.

N positions at which a token is chosen (a row may have several), V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.sample.tables import ANY_TOKEN, Adjustments
from raypp.ops.sample.vocabulary_part import VocabularyPart
from raypp.row_params import Needs

BANNED = -1e30
"""The logit of a banned token. Finite, and still above a token that is not allowed at all: when bans leave nothing of
what is allowed, the choice is made among that, not among everything."""


def adjusted(logits: torch.Tensor, asked: Adjustments, part: VocabularyPart | None = None) -> torch.Tensor:
    """Return the logits with everything done to them that needs and masks say, float32 [N, V].

    What the needs name is done to all rows: it is neutral, bit by bit, for those that do not ask for it.

    Shapes: logits [N, V], which stay as they are; [N, C] of a member's part.
    """
    rows, positions, tables, history = asked.rows, asked.positions, asked.tables, asked.history
    needs, widths, masks = asked.needs, asked.widths, asked.masks
    if not needs & Needs.CHANGES and masks is None:
        return logits
    num_logits = logits.shape[1]
    first, size = (0, num_logits) if part is None else (part.first, part.num_tokens)
    wide = logits.to(torch.float32, copy=True)
    if part is not None:  # one column more stands for all tokens of other members
        wide = F.pad(wide, (0, 1))
    logits = wide[:, :size]

    def places(token_ids: torch.Tensor) -> torch.Tensor:
        at = token_ids.to(torch.int64) - first
        return at if part is None else at.masked_fill((at < 0) | (at >= size), num_logits)

    if Needs.BIAS in needs:
        token_ids, bias = (
            table[:, : widths.biased].index_select(0, rows) for table in (tables.bias_token_ids, tables.bias)
        )
        add_bias(wide, places(token_ids), bias)
    if Needs.PENALTIES in needs:
        penalties = (tables.repetition_penalty, tables.frequency_penalty, tables.presence_penalty)
        weights = (table.index_select(0, rows) for table in penalties)
        seen = (each[:, first : first + size] for each in history.counts(rows, positions))
        penalize(logits, *seen, *weights)
    if Needs.MIN_TOKENS in needs:
        end_token_ids = tables.end_token_ids[:, : widths.end_tokens].index_select(0, rows)
        is_early = positions < tables.min_length.index_select(0, rows)
        is_banned = is_early.unsqueeze(1) & (end_token_ids >= 0)
        ban(wide, places(end_token_ids), is_banned)
    if Needs.BAD_WORDS in needs:
        words = tables.bad_words[:, : widths.bad_words].index_select(0, rows)
        is_banned = completes_bad_word(words, history.tokens.before(rows, positions, words.shape[2] - 1))
        ban(wide, places(words[:, :, -1]), is_banned)
    if Needs.ALLOWED in needs:
        allow_only(logits, tables.allowed.index_select(0, rows), first)
    if masks is not None:
        bits = masks.bitmasks.index_select(0, masks.mask_of.clamp(min=0))
        allow_only(logits, bits.masked_fill_((masks.mask_of < 0).unsqueeze(1), -1), first)
    return wide[:, :num_logits]


def add_bias(logits: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Add to the logits of some tokens of each row.

    Shapes: logits [N, V]; token_ids [N, B] int64; bias [N, B] float32. Unused places repeat one of the row's entries,
    or are token 0 with bias 0.
    """
    logits.scatter_(1, token_ids, logits.gather(1, token_ids).add_(bias))


def penalize(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Make tokens that were seen already less likely: repetition first, then frequency, then presence.

    Repetition (Keskar et al., arXiv:1909.05858) counts prompt and output, the other two only the output.

    Shapes: logits [N, V]; output_counts [N, V] int32, how often each token was generated; in_prompt [N, V] bool;
    repetition (1 is neutral), frequency, presence [N] float32.
    """
    was_generated = output_counts > 0
    factor = repetition.unsqueeze(1)
    weakened = torch.where(logits > 0, logits / factor, logits * factor)
    torch.where(was_generated | in_prompt, weakened, logits, out=logits)
    logits.sub_(output_counts * frequency.unsqueeze(1))
    logits.sub_(was_generated * presence.unsqueeze(1))


def ban(logits: torch.Tensor, token_ids: torch.Tensor, is_banned: torch.Tensor) -> None:
    """Take tokens out of each row's choice where `is_banned`.

    Shapes: logits [N, V]; token_ids [N, E] int64, a negative one is none; is_banned [N, E] bool.
    """
    limits = torch.where(is_banned & (token_ids >= 0), BANNED, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, token_ids.clamp(min=0), limits, "amin")


_BITS = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
_LIMITS_OF_BYTE = torch.where(_BITS == 1, torch.inf, -torch.inf)
"""Of 8 tokens, what their logits are at most, by the byte that holds their bits; [256, 8]."""


def allow_only(logits: torch.Tensor, bitmask: torch.Tensor, first: int = 0) -> None:
    """Take all tokens out of each row's choice whose bit is not set.

    Shapes: logits [N, C], of the tokens from `first` on; bitmask [N, ceil(V / 32)] int32: token t is bit t % 32 of
    word t // 32.
    """
    end = first + logits.shape[1]
    if logits.device.type == "cpu":
        # Looked up by the byte, a third of the time that bits one by one take.
        places = bitmask.contiguous().view(torch.uint8).flatten().to(torch.int32)
        limits = _LIMITS_OF_BYTE.index_select(0, places).view(len(logits), 32 * bitmask.shape[1])[:, first:end]
        torch.minimum(logits, limits.to(logits.dtype), out=logits)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask.unsqueeze(2) >> shifts) & 1
    logits.masked_fill_(bits.flatten(1)[:, first:end] == 0, -torch.inf)


def completes_bad_word(bad_words: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """Return where the last token of a bad word would complete it, bool [N, W].

    Shapes: bad_words [N, W, L], each word at the end of its place, with ANY_TOKEN before it, and nothing but ANY_TOKEN
    where there is no word; history [N, L - 1], the tokens before each position, NO_TOKEN before the first one.
    """
    beginnings, endings = bad_words[:, :, :-1], bad_words[:, :, -1]
    matches = (beginnings == history.unsqueeze(1)) | (beginnings == ANY_TOKEN)
    return matches.all(dim=2) & (endings != ANY_TOKEN)
