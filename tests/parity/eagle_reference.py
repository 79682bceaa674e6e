"""EAGLE heads in plain float32 torch, all positions at once and no cache, and random heads for small models.

Written from the papers and the published tensor names, apart from what the engine computes with: the drafts of the two
are compared.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hf_models import load_reference
from safetensors.torch import load_file, save_file

HEADS = ("eagle", "eagle3", "eagle3_qwen", "eagle3_own_vocabulary")


def make_head(kind: str, target: Path, directory: Path, *, seed: int = 0, head_multiple: int = 1) -> Path:
    """Write a random head for a checkpoint to `directory`, as one of several that are published, and return it.

    It has a multiple of `head_multiple` attention heads.
    """
    rng, config = random.Random(f"{kind}-{seed}"), json.loads((target / "config.json").read_text())
    hidden, vocab, num_layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    num_kv_heads = rng.choice((1, 2))
    num_heads, head_dim, inner = num_kv_heads * rng.choice((1, 2)), rng.choice((8, 16)), rng.choice((48, 80))
    num_heads *= head_multiple
    is_3 = kind.startswith("eagle3")
    draft_vocab = vocab // 2 if kind == "eagle3_own_vocabulary" else vocab
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if is_3 else "EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": vocab,
        "torch_dtype": "float32",
    }
    q, kv = num_heads * head_dim, num_kv_heads * head_dim
    prefix = "midlayer." if is_3 else "layers.0."
    inputs = 2 * hidden if is_3 else hidden
    shapes = {
        "fc.weight": (hidden, 3 * hidden if is_3 else 2 * hidden),
        f"{prefix}self_attn.q_proj.weight": (q, inputs),
        f"{prefix}self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, q),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }
    if is_3:
        settings["draft_vocab_size"] = draft_vocab
        shapes |= {f"{prefix}input_layernorm.weight": (hidden,), f"{prefix}hidden_norm.weight": (hidden,)}
        shapes |= {"norm.weight": (hidden,)}
        settings["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": sorted(rng.sample(range(num_layers), 3)),
            "use_aux_hidden_state": True,
        }
    else:
        shapes |= {"fc.bias": (hidden,), "embed_tokens.weight": (vocab, hidden)}
    if kind == "eagle3_own_vocabulary":
        shapes |= {"lm_head.weight": (draft_vocab, hidden), "embed_tokens.weight": (vocab, hidden)}
    if kind == "eagle3_qwen":  # as `speculators` writes it, with norms of heads and biases
        shapes |= {f"{prefix}self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
        shapes |= {f"{prefix}self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
        outputs = settings.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
        settings |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1 + i for i in outputs]}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    if draft_vocab != vocab:
        chosen = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(settings))
    if kind == "eagle":  # as the first ones were published
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.3 * noise
    return noise * (0.1 if name.endswith("bias") else 0.2)


@dataclass(frozen=True)
class Guess:
    """A draft, and by how much it won."""

    token_id: int
    gap: float


class ReferenceHead:
    """A head and its target, from their directories."""

    def __init__(self, head: Path, target: Path) -> None:
        pickled = head / "pytorch_model.bin"
        self.w = torch.load(pickled) if pickled.is_file() else load_file(head / "model.safetensors")
        self.w = {name: t.float() if t.is_floating_point() else t for name, t in self.w.items()}
        self.config = json.loads((head / "config.json").read_text())
        self.model = load_reference(target)
        self.is_3 = "hidden_norm" in " ".join(self.w)
        self.prefix = "midlayer." if self.is_3 else "layers.0."
        layer = self.config
        self.heads, self.kv_heads, self.head_dim = (
            layer["num_attention_heads"],
            layer["num_key_value_heads"],
            layer["head_dim"],
        )
        inner = layer.get("eagle_config")
        name = "eagle_aux_hidden_state_layer_ids"
        self.depths = [i + 1 for i in inner[name]] if inner else layer.get(name, [])
        self.embedding = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight)

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return what the head is told of the target's states, [T, H]."""
        last: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
        found = self.model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        hook.remove()
        if not self.is_3:
            return found[-1][0]
        each = [*(state[0] for state in found[:-1]), last[0]]
        return torch.cat([each[depth] for depth in self.depths], 1) @ self.w["fc.weight"].T

    @torch.inference_mode()
    def drafts(self, states: torch.Tensor, token_ids: list[int], count: int) -> list[Guess]:
        """Return guesses of what follows `token_ids`, given the target's states at all of them but the last."""
        tokens, features, guesses = list(token_ids[1:]), states[: len(token_ids) - 1], []
        for _ in range(count):
            hidden = self._layer(features, tokens)[-1:]
            logits = self._logits(hidden)[0]
            best, second = logits.topk(2).values.tolist()
            guesses.append(Guess(self._target_id(int(logits.argmax())), best - second))
            tokens.append(guesses[-1].token_id)
            features = torch.cat((features, hidden))
        return guesses

    def _layer(self, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        embedded = self.embedding[torch.tensor(tokens)]
        if self.is_3:
            normalized = self._norm(features, "hidden_norm")
            x = torch.cat((self._norm(embedded, "input_layernorm"), normalized), 1)
            residual = normalized if self.config.get("norm_before_residual") else features
        else:
            x = residual = torch.cat((embedded, features), 1) @ self.w["fc.weight"].T + self.w["fc.bias"]
        residual = residual + self._attention(x)
        y = self._norm(residual, "post_attention_layernorm")
        gated = F.silu(y @ self._of("mlp.gate_proj.weight").T) * (y @ self._of("mlp.up_proj.weight").T)
        return residual + gated @ self._of("mlp.down_proj.weight").T

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        def heads(name: str, count: int) -> torch.Tensor:
            y = x @ self._of(f"self_attn.{name}_proj.weight").T
            y = y + self.w.get(f"{self.prefix}self_attn.{name}_proj.bias", torch.zeros(()))
            y = y.view(len(x), count, self.head_dim)
            norm = self.w.get(f"{self.prefix}self_attn.{name}_norm.weight")
            if norm is not None:
                y = F.rms_norm(y, (self.head_dim,), norm, self.config["rms_norm_eps"])
            return y.transpose(0, 1)

        cos, sin = _rotary(len(x), self.head_dim, self.config["rope_theta"])
        q, k, v = heads("q", self.heads), heads("k", self.kv_heads), heads("v", self.kv_heads)
        q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return out @ self._of("self_attn.o_proj.weight").T

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.w.get("lm_head.weight", self.model.get_output_embeddings().weight)
        if self.is_3:
            hidden = F.rms_norm(hidden, hidden.shape[1:], self.w["norm.weight"], self.config["rms_norm_eps"])
        return hidden @ head.T

    def _target_id(self, draft_id: int) -> int:
        return draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[1:], self._of(f"{name}.weight"), self.config["rms_norm_eps"])

    def _of(self, name: str) -> torch.Tensor:
        return self.w[self.prefix + name]


def _rotary(length: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, length, 1), torch.arange(length)[None])
    return cos[0], sin[0]
