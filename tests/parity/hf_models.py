"""Small random checkpoints of each family, and what transformers generates from them.

Over the seeds a family's checkpoints vary in sizes, GQA ratio, tied embeddings, biases, rotary scaling, file layout,
precision, and in which form config.json is written.
"""

from __future__ import annotations

import json
import random
import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers  # its classes are imported where they are used: that takes seconds

DENSE_FAMILIES = ("qwen3", "qwen2", "llama")
EXPERT_FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "minimax_m2")
FAMILIES = DENSE_FAMILIES + EXPERT_FAMILIES
WINDOW_FAMILIES = ("mistral", "ministral", "ministral3", "gpt_oss", "gemma2", "gemma3", "gemma4", "gemma4_moe")
"""With a window: in all layers, and in some."""
LATENT_FAMILIES = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4")
"""Keys and values are made of latents."""
GEMMA = ("gemma2", "gemma3")
GEMMA4 = ("gemma4", "gemma4_moe")
"""The same classes of transformers, dense and with experts beside the MLP."""
STATE_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Gated delta nets, and gated attention in some of the layers."""

if find_spec("fla") is not None:  # whose kernels transformers would take, and a CPU cannot run
    sys.modules["fla"] = None  # type: ignore[assignment]
    for _family in STATE_FAMILIES:
        import_module(f"transformers.models.{_family}.modeling_{_family}")
    del sys.modules["fla"]

_ARCHITECTURES = {
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "gpt_oss": "GptOss",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "gemma4_moe": "Gemma4",
    "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v2": "DeepseekV2",
    "glm4_moe_lite": "Glm4MoeLite",
    "mistral4": "Mistral4",
    "minimax_m2": "MiniMaxM2",
}
_GQA_RATIOS = (1, 2, 4)
# The larger, the more varied the continuations, and the larger what rounding does to the logits: it stays below 1e-4.
_WEIGHT_SCALES = {
    "qwen3": (0.2, 0.25, 0.3),
    "qwen2": (0.16, 0.18, 0.2),
    "llama": (0.12, 0.15, 0.18),
    "qwen3_moe": (0.2, 0.25, 0.3),
    "mixtral": (0.12, 0.15, 0.18),
    "mistral": (0.12, 0.15, 0.18),
    "ministral": (0.12, 0.15, 0.18),
    "ministral3": (0.12, 0.15, 0.18),
    "gpt_oss": (0.2, 0.25, 0.3),
    "gemma2": (0.2, 0.25, 0.3),
    "gemma3": (0.2, 0.25, 0.3),
    "gemma4": (0.2, 0.25, 0.3),
    "gemma4_moe": (0.2, 0.25, 0.3),
    "glm4_moe": (0.2, 0.25, 0.3),
    "minimax_m2": (0.2, 0.25, 0.3),
    "deepseek_v3": (0.2, 0.25, 0.3),
    "deepseek_v2": (0.2, 0.25, 0.3),
    "glm4_moe_lite": (0.2, 0.25, 0.3),
    "mistral4": (0.2, 0.25, 0.3),
    "qwen3_5": (0.15, 0.2, 0.25),
    "qwen3_5_moe": (0.1, 0.12, 0.15),
    "qwen3_next": (0.1, 0.12, 0.15),
}
_EXPERTS = ((3, 2), (5, 1), (60, 6), (4, 4), (5, 3))  # there are, and by token
# Writing and reading these files takes milliseconds.
transformers.utils.logging.disable_progress_bar()

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that prompts of a few tokens feel it
}
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_GROWTH: tuple[dict[str, Any], ...] = (
    {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"llama_4_scaling_beta": 0.7, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 7},
    {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 32, "factor": 16.0},
)
"""Of queries, with the position; contexts of a few tokens, so that prompts feel it."""


def make_checkpoint(family: str, seed: int, directory: Path, *, min_layers: int = 2, **others: Any) -> Path:
    """Write a random model to `directory` (made if need be) and return it. Equal arguments, equal files.

    Fields of its configuration may be given.

    Weights are large enough, norms and biases random enough, that greedy continuations vary and near-ties are rare.
    """
    name = _ARCHITECTURES[family]
    of_config = "TextConfig" if family.startswith(("qwen3_5", "gemma3", "gemma4")) else "Config"
    config_class, model_class = (getattr(transformers, name + end) for end in (of_config, "ForCausalLM"))
    choices = _configuration(family, seed, min_layers) | others
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config_class(**choices))
        _randomize(model, adds_one=family in (*STATE_FAMILIES, *GEMMA))
        if family in (*GEMMA, *GEMMA4):  # else its scaled embedding, once more the LM head, says again what was said
            model.model.embed_tokens.weight.data.mul_(0.25)
    # Most are float32: rounding to 16 bits makes equal logits likelier.
    dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float16)[seed % 4]
    model.to(dtype).save_pretrained(directory, max_shard_size="60KB" if seed % 3 == 1 else "5GB")
    if seed % 2:
        _write_published_form(directory / "config.json")
    return directory


def sizes_for_members(family: str, count: int, seed: int) -> dict[str, Any]:
    """Return sizes that `count` members divide, but for the vocabulary; of KV heads also fewer than members."""
    sizes = {
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_key_value_heads": (12, 3 if count == 3 else 2, 1)[seed % 3],
        "intermediate_size": 96,
        "vocab_size": 199,
    }
    if family in STATE_FAMILIES:
        sizes |= {"linear_num_key_heads": 12, "linear_num_value_heads": 12}
    if family in GEMMA4:
        sizes |= {"num_global_key_value_heads": (1, 12, 3 if count == 3 else 2)[seed % 3]}
    if family in ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "glm4_moe", "gemma4_moe"):
        sizes |= {"moe_intermediate_size": 48}
    if family in ("qwen3_5_moe", "qwen3_next"):
        sizes |= {"shared_expert_intermediate_size": 24}
    if family in LATENT_FAMILIES:
        sizes |= {"moe_intermediate_size": 48, "num_key_value_heads": 12}
    return sizes


def _configuration(family: str, seed: int, min_layers: int) -> dict[str, Any]:
    rng = random.Random(f"{family}-{seed}")
    ratio = _GQA_RATIOS[seed % 3]
    num_heads = ratio * rng.choice((1, 2))
    hidden_size = rng.choice((32, 48, 64, 96))
    head_dim = rng.choice((8, 16, 24))  # mostly not hidden_size / num_heads; Qwen2 knows no other
    choices: dict[str, Any] = {
        "vocab_size": rng.choice((128, 199, 256, 512)),
        "hidden_size": hidden_size,
        "intermediate_size": rng.choice((48, 64, 120)),
        "num_hidden_layers": max(min_layers, rng.randint(2, 6)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // ratio,
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "tie_word_embeddings": seed % 4 in (1, 2),
        "initializer_range": rng.choice(_WEIGHT_SCALES[family]),
        "rope_theta": rng.choice((1000.0, 10000.0, 1e6)),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family in LATENT_FAMILIES:
        choices |= _latents(family, seed) | _experts("glm4_moe", seed)
        choices |= {"num_key_value_heads": num_heads}
        if family == "deepseek_v2":
            choices |= {"topk_method": ("group_limited_greedy", "greedy")[seed % 3 == 1], "norm_topk_prob": False}
        if family == "glm4_moe_lite":
            kinds = ("sparse", "dense")
            num_layers, num_dense = choices["num_hidden_layers"], choices.pop("first_k_dense_replace")
            choices |= {"mlp_layer_types": [kinds[index < num_dense] for index in range(num_layers)]}
        choices.pop("use_qk_norm")
    elif family != "qwen2":
        choices |= {"head_dim": head_dim}
    if family in WINDOW_FAMILIES:
        choices |= {"sliding_window": rng.choice((1, 3, 8, 21, 64))}
        if family == "gpt_oss":
            choices |= _experts(family, seed)
    if family not in ("qwen2", "mixtral", "minimax_m2", *WINDOW_FAMILIES) or family in GEMMA4:
        choices |= {"attention_bias": seed % 3 == 2}
    if family in EXPERT_FAMILIES:
        choices |= _experts(family, seed)
    if family in STATE_FAMILIES:
        choices |= _states(family, seed, choices["num_hidden_layers"])
    if family == "ministral" or (family in ("gpt_oss", *GEMMA) and seed % 2 == 0):
        kinds = ("sliding_attention", "full_attention")
        choices |= {"layer_types": [kinds[index % 3 == seed % 3] for index in range(choices["num_hidden_layers"])]}
    if family in GEMMA:
        choices |= {"query_pre_attn_scalar": rng.choice((7, 24)), "final_logit_softcapping": (None, 3.0)[seed % 2]}
    if family == "gemma2":
        choices |= {"attn_logit_softcapping": rng.choice((2.0, 50.0))}
    if family == "gemma3":
        choices |= {"sliding_window_pattern": 2 + seed % 2}
    if family in GEMMA4:
        return choices | _gemma4(family, seed, choices)
    if family == "llama":
        choices |= {"mlp_bias": seed % 5 == 2}
    if family in STATE_FAMILIES:
        theta = choices.pop("rope_theta")
        return choices | {
            "rope_parameters": {
                "rope_theta": theta,
                "rope_type": "default",
                "partial_rotary_factor": (0.25, 0.5)[seed % 2],
            }
        }
    rope = {"rope_theta": choices.pop("rope_theta"), "rope_type": "default"}
    if (family == "llama" and seed % 2 == 0) or seed % 7 == 3:
        rope |= _LLAMA3_ROPE
    elif seed % 7 == 5:
        rope |= {"rope_type": "linear", "factor": 2.0}
    elif seed % 7 == 1:
        rope |= _YARN_ROPE | ({"truncate": False} if seed % 3 == 1 else {"mscale": 1.0, "mscale_all_dim": 0.7})
    elif seed % 7 == 6:
        rope |= {"rope_type": "dynamic", "factor": 4.0}
    if family in ("mistral4", "ministral3"):  # transformers' other ropes turn a whole head, and no query grows
        rope |= _YARN_ROPE | _GROWTH[seed % 3]
    if family in ("glm4_moe", "minimax_m2"):
        rope |= {"partial_rotary_factor": (0.5, 1.0, 0.5)[seed % 3]}
    if family == "gemma3":
        rope.pop("truncate", None)  # transformers looks for it outside of a kind's parameters
        return choices | {"rope_parameters": {"full_attention": rope, "sliding_attention": _LOCAL_ROPE}}
    return choices | {"rope_parameters": rope}


def _gemma4(family: str, seed: int, choices: dict[str, Any]) -> dict[str, Any]:
    """Return what Gemma 4 has: heads of other sizes and numbers in global layers, whose values mostly are keys."""
    rng, num_layers, num_heads = (
        random.Random(f"{family}-own-{seed}"),
        *map(choices.__getitem__, ("num_hidden_layers", "num_attention_heads")),
    )
    kinds = ["sliding_attention"] * num_layers
    for index in {seed % num_layers, num_layers - 1}:
        kinds[index] = "full_attention"
    rope = {"rope_type": "proportional", "rope_theta": choices.pop("rope_theta"), "partial_rotary_factor": 0.25}
    rope |= ({}, {"partial_rotary_factor": 0.5, "factor": 2.0})[seed % 3 == 0]
    own: dict[str, Any] = {
        "layer_types": kinds,
        "global_head_dim": rng.choice((32, 48)),
        "num_global_key_value_heads": rng.choice([n for n in (1, 2, num_heads) if num_heads % n == 0]),
        "attention_k_eq_v": seed % 4 != 2,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": (None, 3.0)[seed % 2],
        "rope_parameters": {"full_attention": rope, "sliding_attention": _LOCAL_ROPE},
    }
    if family == "gemma4_moe":
        num_experts, num_chosen = _EXPERTS[seed % 5]
        own |= {"enable_moe_block": True, "num_experts": num_experts, "top_k_experts": num_chosen}
        own |= {"moe_intermediate_size": (24, 40)[seed % 2]}
    return own


def _latents(family: str, seed: int) -> dict[str, Any]:
    """Return sizes of latents and of heads that are made of them: odd ones, and rotary parts as large as a latent."""
    rng, is_v2 = random.Random(f"{family}-latents-{seed}"), family == "deepseek_v2"
    sizes: dict[str, Any] = {
        "kv_lora_rank": rng.choice((8, 20, 34 if is_v2 else 33)),  # whose modules of transformers take pairs alone
        "q_lora_rank": rng.choice((12, 27)) if seed % 3 else None,
        "qk_nope_head_dim": rng.choice((6 if is_v2 else 7, 12, 16)),
        "qk_rope_head_dim": rng.choice((4, 6, 32)),
        "v_head_dim": rng.choice((9, 12, 16)),
    }
    return sizes if is_v2 else sizes | {"rope_interleave": seed % 4 != 3}


def _states(family: str, seed: int, num_layers: int) -> dict[str, Any]:
    """Return sizes of gated delta nets: odd ones, and several value heads for each key head."""
    rng = random.Random(f"{family}-states-{seed}")
    num_k_heads = rng.choice((1, 2, 3))
    kinds = ["linear_attention"] * num_layers
    for index in {seed % num_layers, num_layers - 1 - seed % 2}:
        kinds[index] = "full_attention"
    sizes: dict[str, Any] = {
        "layer_types": kinds,
        "linear_num_key_heads": num_k_heads,
        "linear_num_value_heads": num_k_heads * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((8, 12, 16)),
        "linear_value_head_dim": rng.choice((8, 12, 20)),
        "linear_conv_kernel_dim": rng.choice((2, 3, 4)),
        "head_dim": rng.choice((16, 24, 32)),
    }
    if family != "qwen3_5":
        num_experts, num_chosen = _EXPERTS[seed % 5]
        sizes |= {
            "num_experts": num_experts,
            "num_experts_per_tok": num_chosen,
            "moe_intermediate_size": (24, 40)[seed % 2],
            "shared_expert_intermediate_size": (40, 16)[seed % 2],
        }
    return sizes


def _experts(family: str, seed: int) -> dict[str, Any]:
    num_experts, num_chosen = _EXPERTS[seed % 5]
    if family == "gpt_oss":  # few: these run with all windows
        return {"num_local_experts": min(num_experts, 8), "num_experts_per_tok": num_chosen}
    if family in ("mixtral", "minimax_m2"):
        return {"num_local_experts": num_experts, "num_experts_per_tok": num_chosen}
    if family == "glm4_moe":
        is_even = num_experts % 2 == 0 and num_experts > 2
        return {
            "n_routed_experts": num_experts,
            "num_experts_per_tok": num_chosen if not is_even else min(num_chosen, num_experts // 2),
            "moe_intermediate_size": (24, 40)[seed % 2],
            "n_shared_experts": 1 + seed % 2,
            "n_group": 2 if is_even else 1,
            "topk_group": 1,
            "routed_scaling_factor": (1.0, 2.5)[seed % 2],
            "norm_topk_prob": seed % 4 < 3,
            "first_k_dense_replace": seed % 3,
            "use_qk_norm": seed % 4 < 2,
        }
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": num_chosen,
        "moe_intermediate_size": (24, 40)[seed % 2],
        "norm_topk_prob": seed % 4 < 2,
        "decoder_sparse_step": 1 + (seed % 6 == 4),
        "mlp_only_layers": [1] if seed % 6 == 3 else [],
    }


@torch.no_grad()
def _randomize(model: Any, *, adds_one: bool = False) -> None:
    """Make visible what initialization hides: norms are not one, biases not zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale")):
            around = 0.0 if adds_one and not name.endswith("linear_attn.norm.weight") else 1.0
            parameter.copy_(around + 0.3 * torch.randn_like(parameter))
        elif name.endswith("conv1d.weight"):
            parameter.copy_(0.4 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.copy_(0.1 * torch.randn_like(parameter))
        elif name.endswith("sinks"):
            parameter.copy_(torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1.0 + 0.3 * torch.rand_like(buffer))


def _write_published_form(file: Path) -> None:
    """Rewrite config.json as checkpoints had it before transformers 5."""
    values = json.loads(file.read_text())
    if values["model_type"] == "gemma4_text":  # whose ropes are as here
        own = values.pop("per_layer_config").popitem()[1]
        values |= {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
        file.write_text(json.dumps(values, indent=2))
        return
    rope = values.pop("rope_parameters")
    if "sliding_attention" in rope:
        values["rope_local_base_freq"] = rope.pop("sliding_attention")["rope_theta"]
        rope = rope.pop("full_attention")
    values["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    if values["model_type"] in ("gpt_oss", "gemma2", "gemma3_text") or set(values.get("layer_types", ())) <= {
        "full_attention"
    }:
        values.pop("layer_types", None)
    if "moe_intermediate_size" in values and "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    file.write_text(json.dumps(values, indent=2))


@lru_cache(maxsize=2)
def load_reference(path: Path) -> Any:
    """Return transformers' model of a directory, in float32."""
    config = json.loads((path / "config.json").read_text())
    is_known = config["model_type"] != "mistral4"  # to `AutoModelForCausalLM`, in transformers 5.17
    model_class: Any = transformers.AutoModelForCausalLM if is_known else transformers.Mistral4ForCausalLM
    attention = "eager" if config["model_type"] in ("gpt_oss", "gemma2") else "sdpa"
    return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


@torch.inference_mode()
def hf_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits at every token of a sequence, [T, V] float32."""
    logits: torch.Tensor = load_reference(path)(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


def hf_choices(path: Path, prompt_token_ids: list[int], output: list[int]) -> tuple[list[int], list[float]]:
    """Return what transformers chooses in place of each token of an output, and by how much it prefers that."""
    return choices_of(hf_logits(path, prompt_token_ids + output[:-1])[len(prompt_token_ids) - 1 :], output)


def choices_of(logits: torch.Tensor, output: list[int]) -> tuple[list[int], list[float]]:
    """Return the most likely tokens, and by how much each exceeds the output's. Shapes: logits [N, V], output [N]."""
    best = logits.max(dim=-1)
    given = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return best.indices.tolist(), (best.values - given).tolist()


@torch.inference_mode()
def hf_greedy(path: Path, prompt_token_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Return transformers' greedy continuation of a prompt, never ending early, and its margins.

    Returns:
        The tokens, and for each by how much its logit exceeds the second best.
    """
    model = load_reference(path)
    cache = transformers.DynamicCache(config=model.config)
    tokens, gaps, inputs = [], [], prompt_token_ids
    for _ in range(num_tokens):
        logits = model(
            input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        inputs = [int(logits.argmax())]
        tokens += inputs
        gaps.append(best - second)
    return tokens, gaps
