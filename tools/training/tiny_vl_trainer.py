"""Training steps of `tiny-vl`, the average of the weights that they pass through, and what either says of pictures.

Weights are float32; a step computes with copies of 16 bits on a GPU, where it is one CUDA graph for each size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tiny_vl_forward import Grid, PictureBatch, answer_loss, text_loss, told_exactly
from torch import Tensor

GARBLED = 0.1
"""The share of the answers' tokens that are exchanged where they are read."""
AVERAGE_EVERY = 4
"""Steps between two additions to the average."""
AVERAGE_DECAY = 0.997
"""What the average keeps of itself: it reaches back over some thousand steps."""


class _Losses(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PictureBatch, text: tuple[Tensor, Tensor], grid: Grid) -> tuple[Tensor, Tensor]:
        return answer_loss(self.model, batch, grid), text_loss(self.model, *text)


class Trainer:
    """Steps of one size each.

    What changes from step to step lies in tensors that stay where they are: the batch, the text, the learning rate.

    Args:
        model: With float32 weights.
        batch: One like all others.
        text: Conversations without pictures, likewise.
        learning_rate: The highest.
        dtype: That steps compute in.
        graphs: Whether a step is a CUDA graph.
    """

    def __init__(
        self,
        model: Any,
        batch: PictureBatch,
        text: tuple[Tensor, Tensor],
        learning_rate: float,
        *,
        dtype: torch.dtype,
        graphs: bool,
    ) -> None:
        self._model = model
        self._losses = _Losses(model)
        self._dtype = dtype
        self._device = batch.tokens.device
        self._has_graphs = graphs
        self._batch = PictureBatch(*(part.clone() for part in vars(batch).values()))
        self._text = (text[0].clone(), text[1].clone())
        self._peak = learning_rate
        self._learning_rate = torch.tensor(0.0, device=self._device)
        self._grids: dict[tuple[int, int], Grid] = {}
        self._graphs: dict[tuple[int, int], Any] = {}
        self._pool: Any = None  # of the graphs' memory
        self._num_steps = 0
        self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        """Of the weights, by name."""
        self.loss = torch.zeros((), device=self._device)
        """Summed up over steps."""
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
            lr=self._learning_rate,
            betas=(0.9, 0.98),
            fused=True,
            capturable=graphs,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights as they are now, by name."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def garble(self, batch: PictureBatch, words: Tensor) -> PictureBatch:
        """Return the batch with some of the answers' tokens exchanged, but not in what is to be told.

        What stands before it then says little about the next word; the picture does. Without this, a pair of colour and
        shape that was never seen is never said.
        """
        is_garbled = (torch.rand(batch.tokens.shape, device=self._device) < GARBLED) & (batch.targets >= 0)
        others = words[torch.randint(len(words), batch.tokens.shape, device=self._device)]
        return replace(batch, tokens=torch.where(is_garbled, others, batch.tokens))

    def step(self, size: tuple[int, int], batch: PictureBatch, text: tuple[Tensor, Tensor], share: float) -> None:
        """Train on pictures of one size. `share`: of the peak learning rate."""
        for kept, new in zip((*vars(self._batch).values(), *self._text), (*vars(batch).values(), *text), strict=True):
            kept.copy_(new)
        self._learning_rate.fill_(self._peak * share)
        if size not in self._grids:
            self._grids[size] = Grid.of(self._model.model.visual, *size, self._device)
        if not self._has_graphs:
            self._run(size)
        else:
            if size not in self._graphs:
                self._graphs[size] = self._captured(size)
            self._graphs[size].replay()
        self._num_steps += 1
        if self._num_steps % AVERAGE_EVERY == 0:
            # At first it has to leave where it began.
            weight = max(1 - AVERAGE_DECAY, AVERAGE_EVERY / self._num_steps)
            torch._foreach_lerp_([*self.average.values()], [*self.weights().values()], weight)

    def _captured(self, size: tuple[int, int]) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(size)
        self._pool = graph.pool()  # one after the other uses it, and leaves nothing there
        return graph

    def _run(self, size: tuple[int, int]) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        copies = {name: parameter.to(self._dtype) for name, parameter in self._losses.named_parameters()}
        loss, of_text = torch.func.functional_call(self._losses, copies, (self._batch, self._text, self._grids[size]))
        self.loss += loss.detach()
        torch.autograd.backward(loss + 0.1 * of_text)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=True)
        self._optimizer.step()


@dataclass(frozen=True)
class HeldOut:
    """Pictures of seeds of their own that are asked for all there is, batch by batch with their sizes."""

    batches: Sequence[tuple[tuple[int, int], PictureBatch]]

    @torch.inference_mode()
    def share_told_exactly(self, model: Any, weights: Mapping[str, Tensor]) -> float:
        """Return the share of pictures of which a model says exactly what it should; weights rounded as exported."""
        rounded = {name: tensor.to(torch.bfloat16).to(tensor.dtype) for name, tensor in weights.items()}
        model = with_weights(model, rounded)
        hits = [
            told_exactly(model, batch, Grid.of(model.model.visual, *size, batch.tokens.device))
            for size, batch in self.batches
        ]
        return torch.cat(hits).float().mean().item()


def with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """Return a copy of a model with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
            parameter.grad = None
    return other
