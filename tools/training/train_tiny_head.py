"""Train `tiny-eagle3`, the EAGLE-3 head of `tiny`, from `tiny`'s own hidden states. Run by `train_tiny.py --head`.

    corpus + what tiny itself writes -> hidden states after three depths, next tokens -> head -> published layout

The head is trained as it drafts (arXiv:2503.01840, "training-time test"): its later steps see its own earlier outputs
in place of the model's hidden states. It starts from tiny's last layer, and so knows most at once.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
from safetensors.torch import save_file
from torch import Tensor, nn

AUX_DEPTHS = (2, 4, 6)
"""Layers after which hidden states are taken; 6 is the last, before the final norm."""
DRAFT_VOCAB_SIZE = 768
INTERMEDIATE_SIZE = 256
NUM_STEPS = 3
STEP_WEIGHT = 0.8  # of each step's loss, relative to the one before


@dataclass(frozen=True)
class HeadSizes:
    """What the head shares with its target."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: Any) -> HeadSizes:
        """Read them from a transformers configuration."""
        return cls(
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            theta=config.rope_parameters["rope_theta"],
        )


class Target:
    """The model whose tokens are guessed: gives hidden states and logits, learns nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._last: list[Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda _, args: self._last.append(args[0]))

    @torch.no_grad()
    def __call__(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, T, 3 H] and logits [B, T, V] of tokens [B, T]."""
        self._last.clear()
        out = self.model(token_ids, output_hidden_states=True, use_cache=False)
        states = [*out.hidden_states[:-1], self._last[0]]
        return torch.cat([states[depth] for depth in AUX_DEPTHS], -1), out.logits


class Head(nn.Module):
    """One EAGLE-3 layer, for training: no cache, all positions at once."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        hidden, q, kv = sizes.hidden, sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.sizes = sizes
        self.fc = nn.Linear(len(AUX_DEPTHS) * hidden, hidden, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.q_proj, self.o_proj = nn.Linear(2 * hidden, q, bias=False), nn.Linear(q, hidden, bias=False)
        self.k_proj, self.v_proj = nn.Linear(2 * hidden, kv, bias=False), nn.Linear(2 * hidden, kv, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.gate_proj = nn.Linear(hidden, INTERMEDIATE_SIZE, bias=False)
        self.up_proj = nn.Linear(hidden, INTERMEDIATE_SIZE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE_SIZE, hidden, bias=False)
        self.norm = nn.Parameter(torch.ones(hidden))
        self.lm_head = nn.Linear(hidden, DRAFT_VOCAB_SIZE, bias=False)

    @torch.no_grad()
    def start_from(self, model: Any, draft_to_target: Tensor) -> None:
        """Take over the target's last layer, as far as it fits, and its embedding as the LM head."""
        layer, hidden = model.model.layers[-1], self.sizes.hidden
        self.fc.weight.copy_(torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], 1))
        for mine, theirs in (
            (self.q_proj, layer.self_attn.q_proj),
            (self.k_proj, layer.self_attn.k_proj),
            (self.v_proj, layer.self_attn.v_proj),
        ):
            mine.weight[:, hidden:] = theirs.weight
            mine.weight[:, :hidden] *= 0.5
        self.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
        largest = layer.mlp.down_proj.weight.norm(dim=0).topk(INTERMEDIATE_SIZE).indices
        self.gate_proj.weight.copy_(layer.mlp.gate_proj.weight[largest])
        self.up_proj.weight.copy_(layer.mlp.up_proj.weight[largest])
        self.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, largest])
        self.post_attention_layernorm.copy_(layer.post_attention_layernorm.weight)
        self.hidden_norm.copy_(layer.input_layernorm.weight)
        self.input_layernorm.copy_(model.model.layers[0].input_layernorm.weight)
        self.norm.copy_(model.model.norm.weight)
        self.lm_head.weight.copy_(model.model.embed_tokens.weight[draft_to_target])

    def forward(self, aux: Tensor, embedded: Tensor) -> list[Tensor]:
        """Return the logits of `NUM_STEPS` guesses, each [B, T, draft vocabulary].

        Shapes: aux [B, T, 3 H], hidden states at a position; embedded [B, T, H], the token after it. Guess s at
        position p has seen the model's states up to p - s alone; what it guesses is two tokens after p.
        """
        hidden, keys, values, guesses = self.fc(aux), [], [], []
        cos, sin = self._rotation(embedded.shape[1])
        entering = self._normalized(embedded, self.input_layernorm)
        for step in range(NUM_STEPS):
            if step:  # what the head made of the position before takes the place of the model's state
                hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
            both = torch.cat([entering, self._normalized(hidden, self.hidden_norm)], -1)
            query, key, value = (
                self._heads(projection(both)) for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
            keys.append(self._rotated(key, cos, sin))
            values.append(value)
            hidden = hidden + self.o_proj(self._attend(self._rotated(query, cos, sin), keys, values))
            inner = self._normalized(hidden, self.post_attention_layernorm)
            hidden = hidden + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))
            guesses.append(self.lm_head(self._normalized(hidden, self.norm)))
        return guesses

    def _attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend at step s: to the first step's keys up to p - s, then to one key of each later step."""
        group, step, length = self.sizes.num_heads // self.sizes.num_kv_heads, len(keys) - 1, query.shape[2]
        keys = [key.repeat_interleave(group, 1) for key in keys]
        values = [value.repeat_interleave(group, 1) for value in values]
        scores = query @ keys[0].transpose(-1, -2)
        seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
        columns = [scores.masked_fill(~seen, -1e9)]
        for later in range(1, step + 1):
            shifted = _delayed(keys[later], step - later)
            columns.append((query * shifted).sum(-1, keepdim=True))
        weights = (torch.cat(columns, -1) * self.sizes.head_dim**-0.5).softmax(-1)
        out = weights[..., :length] @ values[0]
        for later in range(1, step + 1):
            column = length + later - 1
            out = out + weights[..., column : column + 1] * _delayed(values[later], step - later)
        return out.transpose(1, 2).flatten(2)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.sizes.head_dim, 2) / self.sizes.head_dim
        angles = torch.arange(length)[:, None] * self.sizes.theta**-exponents
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.sizes.eps)


def _delayed(x: Tensor, count: int) -> Tensor:
    """Return x with each position holding what stood `count` positions before it. Shapes: x [B, heads, T, D]."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


@torch.no_grad()
def write_texts(model: Any, prompts: Tensor, num_tokens: int) -> Tensor:
    """Return prompts with what the model says next, [B, P + num_tokens]: half of the rows greedily, half sampled."""
    half = len(prompts) // 2
    common = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "use_cache": True}
    greedy = model.generate(prompts[:half], do_sample=False, **common)
    sampled = model.generate(prompts[half:], do_sample=True, temperature=0.8, **common)
    return torch.cat([greedy, sampled])


def choose_draft_vocabulary(target: Target, windows: Tensor) -> Tensor:
    """Return the tokens that the model likes best most often, ascending, [draft vocabulary] int64."""
    counts = torch.zeros(target.model.config.vocab_size)
    for part in windows.split(16):
        liked = target(part)[1].argmax(-1).flatten()
        counts += torch.bincount(liked, minlength=len(counts))
    return counts.topk(DRAFT_VOCAB_SIZE).indices.sort().values


def head_loss(head: Head, target: Target, windows: Tensor, draft_to_target: Tensor) -> tuple[Tensor, list[float]]:
    """Return the loss over windows [B, T + 1], and each step's share of guesses equal to the model's greedy token."""
    aux, logits = target(windows)
    embedded = target.model.model.embed_tokens(windows[:, 1:])
    guesses = head(aux[:, :-1], embedded.detach())
    said = logits[:, 1:].softmax(-1)
    wanted = said[..., draft_to_target]
    liked = said.argmax(-1)
    loss, agreed = torch.zeros(()), []
    for step, guess in enumerate(guesses):
        log_probabilities = guess[:, step:].float().log_softmax(-1)
        loss = loss - STEP_WEIGHT**step * (wanted[:, step:] * log_probabilities).sum(-1).mean()
        agreed.append((draft_to_target[guess[:, step:].argmax(-1)] == liked[:, step:]).float().mean().item())
    return loss, agreed


def train_head(model: Any, code: Any, chat: Any, arguments: Any) -> tuple[Head, Tensor, list[dict[str, Any]]]:
    """Train; return the head, its vocabulary, and the loss curve.

    Args:
        model: The target, float32, in evaluation mode.
        code: Stream of the corpus; see `train_tiny.Stream`.
        chat: Stream of conversations.
        arguments: `head_steps`, `head_batch`, `head_context`, `head_learning_rate`, `head_seconds`, `seed`.
    """
    generator = torch.Generator().manual_seed(arguments.seed)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    target = Target(model)
    started = time.perf_counter()
    windows = code.batch(128, 512, generator, aligned=False)
    draft_to_target = choose_draft_vocabulary(target, windows)
    head = Head(HeadSizes.of(model.config))
    head.start_from(model, draft_to_target)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    norms = [p for p in head.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}],
        lr=arguments.head_learning_rate,
        betas=(0.9, 0.95),
    )
    context = arguments.head_context
    curve: list[dict[str, Any]] = []
    written = torch.empty(0, context + 1, dtype=torch.int64)
    running: list[list[float]] = []
    for step in range(arguments.head_steps):
        share = (step + 1) / arguments.head_steps
        if arguments.head_seconds:
            share = max(share, (time.perf_counter() - started) / arguments.head_seconds)
        if len(written) < arguments.head_written and step % 10 == 0:
            prompts = code.batch(32, 31, generator, aligned=False)
            written = torch.cat([written, write_texts(model, prompts, context + 1 - prompts.shape[1])])
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(share, 1.0))))
        for group in optimizer.param_groups:
            group["lr"] = arguments.head_learning_rate * rate
        num_written = arguments.head_batch // 2
        chosen = torch.randint(len(written), (num_written,), generator=generator)
        num_code = arguments.head_batch - num_written - 1
        batch = torch.cat(
            [
                written[chosen],
                code.batch(num_code, context, generator, aligned=False),
                chat.batch(1, context, generator, aligned=True),
            ]
        )
        loss, agreed = head_loss(head, target, batch, draft_to_target)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        running.append([loss.item(), *agreed])
        if (step + 1) % 50 == 0 or share >= 1:
            means = torch.tensor(running).mean(0).tolist()
            seconds = round(time.perf_counter() - started, 1)
            point = {"step": step + 1, "loss": round(means[0], 4), "agreed": [round(x, 4) for x in means[1:]]}
            curve.append({**point, "seconds": seconds})
            print(json.dumps(curve[-1]), flush=True)
            running.clear()
        if share >= 1:
            break
    return head, draft_to_target, curve


def export_head(head: Head, draft_to_target: Tensor, config: Any, out: Path) -> None:
    """Write the head as published ones are laid out: bf16 weights, the vocabulary's maps, configuration."""
    sizes = head.sizes
    out.mkdir(parents=True, exist_ok=True)
    names = {
        "fc.weight": head.fc.weight,
        "midlayer.input_layernorm.weight": head.input_layernorm,
        "midlayer.hidden_norm.weight": head.hidden_norm,
        "midlayer.post_attention_layernorm.weight": head.post_attention_layernorm,
        **{f"midlayer.self_attn.{n}.weight": getattr(head, n).weight for n in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{f"midlayer.mlp.{n}.weight": getattr(head, n).weight for n in ("gate_proj", "up_proj", "down_proj")},
        "norm.weight": head.norm,
        "lm_head.weight": head.lm_head.weight,
    }
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in names.items()}
    tensors["d2t"] = draft_to_target - torch.arange(DRAFT_VOCAB_SIZE)
    tensors["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool).index_fill_(0, draft_to_target, True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "dtype": "bfloat16",
        # Published heads name a layer by its index and mean its output.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [depth - 1 for depth in AUX_DEPTHS],
            "use_aux_hidden_state": True,
        },
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "llama",
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "target_hidden_size": sizes.hidden,
        "tie_word_embeddings": False,
        "vocab_size": sizes.vocab,
    }
    (out / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
