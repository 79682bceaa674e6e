"""The part of the vocabulary whose logits one member of a stage has, and how members choose from all parts.

    greedy, draws        each member's best value and its token
    top-k, top-p         sums by digits of the distance, see `raypp.ops.sample.truncation`
    log-probabilities    each member's sum, rank and most likely tokens

What is exchanged, and how often, depends on the number of positions and on what is chosen, never on the logits.

N positions, C logits of a member, M members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raypp.members import Members

_NO_TOKEN = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """One member's. Parts are of equal size; the last one's logits behind the vocabulary are -inf.

    Args:
        members: Of the stage.
        vocab_size: Of all members together.
    """

    members: Members
    vocab_size: int

    @property
    def size(self) -> int:
        """Logits of a member, C."""
        return -(-self.vocab_size // self.members.count)

    @property
    def first(self) -> int:
        """The token of the member's first logit."""
        return self.members.rank * self.size

    @property
    def num_tokens(self) -> int:
        """Logits that stand for tokens, at most C."""
        return max(0, min(self.size, self.vocab_size - self.first))

    def rows_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the rows of a matrix with one per token, zeros behind the last token, [C, ...].

        Args:
            matrix: [V, ...], or what yields its rows when it is indexed.
        """
        rows = matrix[self.first : self.first + self.num_tokens]
        return torch.cat((rows, rows.new_zeros(self.size - len(rows), *rows.shape[1:])))

    def embedded(self, input_ids: torch.Tensor, look_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the embeddings of tokens, [T, H].

        Args:
            input_ids: [T] int32 or int64.
            look_up: Returns the embeddings of places in this part.
        """
        places = input_ids - self.first
        is_own = (places >= 0) & (places < self.size)
        own = look_up(places.clamp(0, self.size - 1))
        return self.members.sum_(own.masked_fill_(~is_own.unsqueeze(1), 0.0))

    def best(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest value of any member (NaN if there is one), float32 [N], and its lowest token, int64 [N].

        Shapes: values [N, C] float32, of this member's tokens.
        """
        own, places = values.max(dim=-1)
        of_all = self.members.gathered(torch.stack((own.view(torch.int32), (places + self.first).to(torch.int32)), 1))
        found, tokens = of_all[:, :, 0].view(torch.float32), of_all[:, :, 1]
        highest = found.amax(0)
        has_it = (found == highest) | found.isnan()  # which is the largest to torch, too
        return highest, tokens.masked_fill(~has_it, _NO_TOKEN).amin(0).to(torch.int64)

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over the members. Shapes: sums int64 [N, B]."""
        return self.members.gathered(sums.view(torch.int32)).view(torch.int64).sum(0)

    def chosen(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of some tokens, of whichever members, [N, 1]. Shapes: logits [N, C]; tokens [N] int64."""
        places = (tokens - self.first).unsqueeze(1)
        own = logits.gather(1, places.clamp(0, self.size - 1))
        own = own.masked_fill((places < 0) | (places >= self.size), -torch.inf)
        return self.members.gathered(own).amax(0)


def hide_padding(logits: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """Make the logits behind the vocabulary -inf, in place, and return all. Shapes: logits [N, C]."""
    if part is not None and part.num_tokens < part.size:
        logits[:, part.num_tokens :].fill_(-torch.inf)
    return logits
