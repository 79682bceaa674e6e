"""The recurrence of a gated delta net in plain torch, by triangular systems; see `raypp.ops.row_state`.

Everything has the states' type: float32, or float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

PIECE = 64
"""Tokens of a triangular system, as fla-core has them: its size grows with their square."""
_NORM_EPS = 1e-6
"""Of the length of queries and keys; transformers 5.17 has it in `l2norm`."""


class Entries(NamedTuple):
    """What tokens add to a state. R rows, n tokens."""

    keys: torch.Tensor  # [R, n, Hv, Dk]
    values: torch.Tensor  # [R, n, Hv, Dv] u
    log_decays: torch.Tensor  # [R, n, Hv]


class Tokens(NamedTuple):
    """The inputs of the recurrence."""

    queries: torch.Tensor  # [R, n, Hv, Dk]
    keys: torch.Tensor  # [R, n, Hv, Dk]
    values: torch.Tensor  # [R, n, Hv, Dv]
    log_decays: torch.Tensor  # [R, n, Hv]
    betas: torch.Tensor  # [R, n, Hv]


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def recur(state: torch.Tensor, before: Entries, tokens: Tokens) -> tuple[torch.Tensor, Entries]:
    """Return the outputs of n tokens, [R, n, Hv, Dv], and what they add to the state.

    Shapes: state [R, Hv, Dk, Dv], of the tokens before those of `before`.
    """
    queries, keys, values, betas = (x.transpose(1, 2) for x in (*tokens[:3], tokens.betas))  # [R, Hv, n, ...]
    gone = tokens.log_decays.transpose(1, 2).cumsum(2)  # [R, Hv, n] since the first of the step, its own included
    old_keys, old_values = before.keys.transpose(1, 2), before.values.transpose(1, 2)
    of_old = before.log_decays.transpose(1, 2)
    left = of_old.flip(2).cumsum(2).flip(2)
    whole = left[:, :, :1].exp() if left.shape[2] else torch.ones_like(gone[:, :, :1])
    rest = (left - of_old).exp()  # of an entry, up to the first token

    def known(x: torch.Tensor) -> torch.Tensor:
        """Products with the state before the first token."""
        products = whole.unsqueeze(3) * (x @ state)
        return products + ((x @ old_keys.transpose(2, 3)) * rest.unsqueeze(2)) @ old_values

    decays = (gone.unsqueeze(3) - gone.unsqueeze(2)).tril().exp().tril()
    since = gone.exp().unsqueeze(3)
    beta = betas.unsqueeze(3)
    system = (beta * (keys @ keys.transpose(2, 3)) * decays).tril(-1)
    right = beta * (values - since * known(keys))
    added = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    outputs = since * known(queries) + ((queries @ keys.transpose(2, 3)) * decays) @ added
    return outputs.transpose(1, 2), Entries(tokens.keys, added.transpose(1, 2), tokens.log_decays)


def absorb(state: torch.Tensor, entries: Entries) -> torch.Tensor:
    """Return the state after the entries' tokens. Shapes: state [R, Hv, Dk, Dv]."""
    if not entries.keys.shape[1]:
        return state
    decays = entries.log_decays.transpose(1, 2)  # [R, Hv, n]
    left = decays.flip(2).cumsum(2).flip(2)
    keys = entries.keys.transpose(1, 2) * (left - decays).exp().unsqueeze(3)
    return state * left[:, :, 0].exp()[:, :, None, None] + keys.transpose(2, 3) @ entries.values.transpose(1, 2)


def scan_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of rows' tokens, one row after the other, [n, Hv, Dv], and the states after them.

    Shapes: queries and keys [n, Hk, Dk], of any length; values [n, Hv, Dv]; log_decays and betas [n, Hv]; states
    [S, Hv, Dk, Dv]; lengths [S], whose sum is n. In the states' type.
    """
    dtype, ratio = states.dtype, values.shape[1] // keys.shape[1]
    queries, keys = (unit(x.to(dtype)).repeat_interleave(ratio, 1) for x in (queries, keys))
    tokens = Tokens(queries * keys.shape[2] ** -0.5, keys, values.to(dtype), log_decays.to(dtype), betas.to(dtype))
    nothing = Entries(*(x[None, :0] for x in (tokens.keys, tokens.values, tokens.log_decays)))
    outputs, ended, begin = [], [], 0
    for state, length in zip(states.split(1), lengths, strict=True):
        for first in range(begin, begin + length, PIECE):
            piece = slice(first, min(first + PIECE, begin + length))
            output, entries = recur(state, nothing, Tokens(*(x[None, piece] for x in tokens)))
            outputs.append(output[0])
            state = absorb(state, entries)
        ended.append(state)
        begin += length
    return torch.cat(outputs), torch.cat(ended)
