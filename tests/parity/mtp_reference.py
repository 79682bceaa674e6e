"""MTP heads of transformers' own layers, all positions at once and no cache, and random heads in small checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from eagle_reference import Guess
from hf_models import load_reference
from safetensors.torch import load_file, save_file
from torch import nn


class MtpModules(nn.Module):
    """The head of a model: norms, a product, a layer that attends, a norm."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layer_types = ["full_attention"]
        config.first_k_dense_replace = 0  # as transformers' `get_mtp_config` says
        config.mlp_layer_types = ["sparse"]
        layers = model.model.layers
        norm, hidden = type(model.model.norm), config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(hidden, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([type(layers[0])(config, 0)])


def add_mtp_head(path: Path, seed: int) -> None:
    """Write a random head into a checkpoint of one file, where its family has it."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = MtpModules(load_reference(path))
        for name, parameter in head.named_parameters():
            parameter.data = (0.3 if "norm" in name else 0.2) * torch.randn_like(parameter)
    _write(path, head)


_IN_A_LAYER = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
"""What parts of a head are called that is stored as one more layer: DeepSeek-V3's, GLM's."""


def _stored(head: MtpModules, path: Path) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Return by each name of a head's tensors those of a checkpoint that are stacked to it, as it is stored."""
    values = json.loads((path / "config.json").read_text())
    if "num_nextn_predict_layers" not in values:
        return {name: [(f"mtp.{name}", tensor)] for name, tensor in head.state_dict().items()}
    prefix, found = f"model.layers.{values['num_hidden_layers']}.", {}
    for name, tensor in head.state_dict().items():
        part, _, rest = name.partition(".")
        inner = name.removeprefix("layers.0.") if part == "layers" else f"{_IN_A_LAYER[part]}.{rest}"
        block, is_experts, kind = inner.partition("experts.")
        if not is_experts or "shared" in block:
            found[name] = [(prefix + inner, tensor)]
            continue
        products = ("gate_proj", "up_proj") if kind.startswith("gate_up") else ("down_proj",)
        found[name] = [
            (f"{prefix}{block}experts.{expert}.{product}.weight", half)
            for expert, matrix in enumerate(tensor)
            for product, half in zip(products, matrix.chunk(len(products)), strict=True)
        ]
    return found


def _write(path: Path, head: MtpModules) -> None:
    tensors = load_file(path / "model.safetensors")
    own = {name: one.detach().contiguous().clone() for each in _stored(head, path).values() for name, one in each}
    save_file(tensors | own, path / "model.safetensors", metadata={"format": "pt"})


class MtpReference:
    """A head and its target, from a checkpoint with both."""

    def __init__(self, path: Path) -> None:
        self.model = load_reference(path)
        self.head = MtpModules(self.model).float().eval()
        found, shapes = load_file(path / "model.safetensors"), self.head.state_dict()
        self.head.load_state_dict(
            {
                name: torch.cat([found[stored].float() for stored, _ in each]).view(shapes[name].shape)
                for name, each in _stored(self.head, path).items()
            }
        )
        self.head.layers[0].self_attn.config._attn_implementation = "eager"

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        found = self.model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        states: torch.Tensor = found[-1][0]
        return states

    @torch.inference_mode()
    def drafts(self, states: torch.Tensor, token_ids: list[int], count: int) -> list[Guess]:
        tokens, features, guesses = list(token_ids[1:]), states[: len(token_ids) - 1], []
        embed, lm_head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        for _ in range(count):
            embedded = self.head.pre_fc_norm_embedding(embed(torch.tensor(tokens)))
            x = self.head.fc(torch.cat((embedded, self.head.pre_fc_norm_hidden(features)), 1))[None]
            length = len(tokens)
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            rotation = self.model.model.rotary_emb(x, self.axes(positions))
            hidden = self.head.layers[0](x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
            hidden = self.head.norm(hidden[0] if hidden.ndim == 3 else hidden)[-1:]
            logits = F.linear(hidden, lm_head.weight)[0]
            best, second = logits.topk(2).values.tolist()
            guesses.append(Guess(int(logits.argmax()), best - second))
            tokens.append(guesses[-1].token_id)
            features = torch.cat((features, hidden))
        return guesses

    def axes(self, positions: torch.Tensor) -> torch.Tensor:
        """Return positions as the model's rotary embedding takes them, along three axes if it has some."""
        return positions[None].expand(3, 1, -1) if "qwen3_5" in self.model.config.model_type else positions


def train_mtp_head(path: Path, texts: list[list[int]], *, num_steps: int) -> float:
    """Teach a checkpoint's head to draft its own model's texts, all of one length; return the share of right guesses.

    Args:
        path: With a head of any kind.
        texts: What the model generates.
        num_steps: Of the optimizer, over all texts.
    """
    reference = MtpReference(path)
    head, model = reference.head.train(), reference.model
    features, ids = torch.stack([reference.states(text) for text in texts]).clone(), torch.tensor(texts)
    embed, lm_head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    length = ids.shape[1] - 2
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    rotation = model.model.rotary_emb(embed[:1], reference.axes(positions))
    head.requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    share = 0.0
    for _ in range(num_steps):
        states = features[:, :length]
        embedded = head.pre_fc_norm_embedding(embed[ids[:, 1:-1]])
        x = head.fc(torch.cat((embedded, head.pre_fc_norm_hidden(states)), 2))
        hidden = head.layers[0](x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        logits = F.linear(head.norm(hidden), lm_head)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        share = float((logits.argmax(2) == ids[:, 2:]).float().mean())
    _write(path, head)
    return share
