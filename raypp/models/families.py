"""The families of models that raypp has, one declaration each: where their config.json and their layers differ.

All have the layer of `raypp.models.layer`. Needs no torch, so that planning stays cheap.

Sources: the published checkpoints' config.json and tensor names; transformers 5.17, `models/llama`, `models/qwen2`,
`models/qwen3`, `models/qwen3_vl`, `models/qwen3_moe`, `models/mixtral`, `models/qwen3_vl_moe`, `models/qwen3_next`,
`models/qwen3_5`, `models/qwen3_5_moe`, `models/gpt_oss`, `models/gemma3`, `models/gemma4`, `models/glm4_moe`,
`models/minimax_m2`, `models/deepseek_v2`, `models/deepseek_v3`, `models/glm4_moe_lite`, `models/mistral4`,
`models/ministral3`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from raypp.models.attention_config import AttentionConfig, LatentConfig
from raypp.models.config_fields import ConfigFields
from raypp.models.rope_config import with_query_growth
from raypp.models.vision_config import VisionFamily


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What checkpoints call the parts of a layer's experts."""

    block: str = "mlp."  # before the others, and `experts.{}.`
    router: str = "gate"
    router_scale: str | None = None  # what a router multiplies the norm of its input by; None: the MLP's norm
    expert_scales: str | None = None  # what the weight of each expert is multiplied by; None: nothing
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


QWEN_EXPERTS = ExpertNames()


@dataclass(frozen=True, kw_only=True)
class ExpertFamily:
    """What the expert models of an architecture have in common."""

    names: ExpertNames = QWEN_EXPERTS
    intermediate_size: str = "moe_intermediate_size"  # the key of config.json that says an expert's
    normalizes: bool | str = True  # whether the weights of a token's experts add up to 1: fixed, or the key
    shared: str | None = None  # the key that says the size of an MLP for all tokens; None: there is none
    counts_shared: bool = False  # whether that key says how many experts large it is; it has no gate then
    has_sigmoid: bool = False  # whether a score is a sigmoid, with a correction, groups and a factor; see `Routing`
    has_groups: bool = False  # whether one that is no sigmoid has groups and a factor, too
    num_ranking: int = 2  # see `Routing`; 1: there are groups only where `topk_method` says so
    has_pairs: bool = False  # whether gate and up take turns in one tensor, experts and router have biases (gpt-oss)
    gate_limit: float | None = None  # where config.json has no `swiglu_limit`; None: nothing is cut off
    switch: str | None = None  # the key that says whether there are experts; None: there are
    num_chosen: str = "num_experts_per_tok"  # the key that says how many a token goes through
    is_beside_mlp: bool = False  # whether sparse layers have an MLP for all tokens, too, each with norms of its own


@dataclass(frozen=True)
class Windows:
    """Which layers of an architecture see a window of `sliding_window` tokens, where `layer_types` does not say it."""

    default: int | None = None  # where config.json has no `sliding_window`; None: no window
    has_switch: bool = False  # whether it counts only where `use_sliding_window` is true
    first_layer: int | None = None  # where it has no `max_window_layers`; None: all layers, whatever that says
    interval: int | None = None  # where it has no `sliding_window_pattern`: of so many layers the last sees all


Activation = Literal["silu", "gelu"]
LayerAttention = Callable[[ConfigFields, int, AttentionConfig], AttentionConfig]
"""Returns what a layer has, given config.json, its index, and what layers have as a rule."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the checkpoints of an architecture have in common."""

    head_dim: str = "head_dim"  # the key that says the elements of a head, of latents those that are rotated
    qkv_bias: bool | str = False  # of queries, keys and values: fixed, or the key of config.json that says it
    attention_output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False  # whether each query and key head is normalized before it is rotated
    has_wide_qk_norm: bool = False  # whether that norm is of all query heads at once, and of all key heads
    has_sinks: bool = False  # see `AttentionConfig`
    defaults: Mapping[str, object]  # what fields of config.json are that it does not have
    weight_prefix: str = "model."  # of the language model's tensors, but for the LM head's
    vision: VisionFamily | None = None  # config.json has `text_config` and `vision_config`; see `models.vision_config`
    windows: Windows | None = None  # None: all layers see all tokens, whatever `sliding_window` says
    layer_attention: LayerAttention | None = None  # where layers differ in more than the window: returns a layer's own
    experts: ExpertFamily | None = None  # None: all layers are dense
    rotated_share: float | None = None  # of a head's elements, where config.json says nothing; None: always all
    has_output_gate: bool = False  # whether attention's output is multiplied by the sigmoid of a projection
    adds_one_to_norms: bool = False  # whether norms multiply by 1 + weight
    full_attention_interval: int | None = None
    """Of so many layers one attends, the others are gated delta nets, where `layer_types` does not say it; None: all
    attend."""
    has_joined_projections: bool = False  # of gated delta nets, see `GatedDeltaConfig`
    mtp_prefix: str | None = None  # of the tensors of a head that drafts the next tokens; None: there is none
    has_mtp_layer: bool = False  # whether such a head is stored as one more layer, in the names of DeepSeek-V3's
    activation: Activation = "silu"  # of MLPs, and of experts
    has_output_norms: bool = False  # whether attention's and the MLP's outputs are normalized before they are added
    scales_embedding: bool = False  # whether embeddings are multiplied by the root of their size
    has_local_rope: bool = False  # whether windowed layers have a rope of their own, see `read_local_rope`
    has_value_norm: bool = False  # whether `qk_norm` has one of value heads beside it, without a weight
    has_layer_scalars: bool = False  # whether the residual stream is multiplied by a number behind each layer
    zeros: tuple[str, ...] = ()
    """Fields that must be 0: models where they are not have parts that only transformers' modules compute."""

    def prefix_of_head(self, num_layers: int, num_drafting_layers: int) -> str | None:
        """Return the prefix of the tensors of a head that drafts; None: a model of those numbers of layers has none."""
        if self.has_mtp_layer and num_drafting_layers:
            return f"{self.weight_prefix}layers.{num_layers}."
        return self.mtp_prefix


_QWEN3_VL_TOWER = VisionFamily(vision_start_token_id=151652, has_deepstack=True)
_QWEN3_5 = Family(
    qkv_bias="attention_bias",
    attention_output_bias="attention_bias",
    qk_norm=True,
    defaults={"head_dim": 256, "max_position_embeddings": 32768},
    rotated_share=0.25,
    has_output_gate=True,
    adds_one_to_norms=True,
    full_attention_interval=4,
    mtp_prefix="mtp.",
)
_QWEN3_5_BESIDE_TOWER = replace(
    _QWEN3_5,
    weight_prefix="model.language_model.",
    vision=VisionFamily(vision_start_token_id=248053, has_deepstack=False),
)
_QWEN3_5_EXPERTS = ExpertFamily(shared="shared_expert_intermediate_size")


def _gemma_attention(fields: ConfigFields, _: int, attention: AttentionConfig) -> AttentionConfig:
    """Return how a layer of Gemma attends: with a factor and a cap of its own."""
    cap = fields.number(_CAP) if fields.get(_CAP) is not None else None
    return replace(attention, scale=fields.number("query_pre_attn_scalar") ** -0.5, soft_cap=cap)


_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
NULL_IS_NONE = {_CAP, LOGIT_CAP, "q_lora_rank"}
"""Fields whose null switches off what they are by default; of others it means that nothing is said."""
_ROPE_OF_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_OF_GEMMA = {
    "head_dim": 256,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_GEMMA3 = Family(
    qkv_bias="attention_bias",
    attention_output_bias="attention_bias",
    qk_norm=True,
    defaults=_OF_GEMMA,
    windows=Windows(4096, interval=6),
    layer_attention=_gemma_attention,
    adds_one_to_norms=True,
    activation="gelu",
    has_output_norms=True,
    scales_embedding=True,
    has_local_rope=True,
)


def _gemma4_attention(fields: ConfigFields, index: int, attention: AttentionConfig) -> AttentionConfig:
    """Return how a layer of Gemma 4 attends: those without a window have heads of another number and size.

    Published files say that once for all of these, transformers 5.17 layer by layer.
    """
    is_global, by_layer = attention.window is None, fields.get("per_layer_config")
    are_keys = is_global and fields.flag("attention_k_eq_v")
    if index == fields.get("num_hidden_layers") - 1 and not is_global:
        raise fields.error("layer_types", "a last layer with a window", "full_attention as the last layer's")
    own: dict[str, object] = {}
    if isinstance(by_layer, dict):  # with keys such as 05
        own = next((values for layer, values in by_layer.items() if layer.zfill(9) == str(index).zfill(9)), own)
    elif is_global:
        own["head_dim"] = fields.integer("global_head_dim", 512)
        own["num_key_value_heads"] = fields.get("num_global_key_value_heads") if are_keys else None
    said = ConfigFields(fields.file, own)
    head_dim = said.integer("head_dim", attention.head_dim)
    num_kv_heads = said.integer("num_key_value_heads", attention.num_kv_heads)
    if head_dim % 2:
        raise fields.error("global_head_dim", head_dim, "an even number: rotary embedding pairs dimensions")
    if attention.num_heads % num_kv_heads:
        expected = f"a divisor of num_attention_heads={attention.num_heads}"
        raise fields.error("num_global_key_value_heads", num_kv_heads, expected)
    return replace(
        attention,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=head_dim,
        scale=1.0,
        values_are_keys=are_keys,
        sees_ahead=not is_global,
    )


_GEMMA4 = Family(
    qkv_bias="attention_bias",
    attention_output_bias="attention_bias",
    qk_norm=True,
    has_value_norm=True,
    defaults={
        "head_dim": 256,
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
    },
    zeros=("hidden_size_per_layer_input", "num_kv_shared_layers"),
    windows=Windows(512, interval=6),
    layer_attention=_gemma4_attention,
    activation="gelu",
    has_output_norms=True,
    has_layer_scalars=True,
    scales_embedding=True,
    has_local_rope=True,
    experts=ExpertFamily(
        names=ExpertNames(
            block="", router="router.proj", router_scale="router.scale", expert_scales="router.per_expert_scale"
        ),
        switch="enable_moe_block",
        num_chosen="top_k_experts",
        is_beside_mlp=True,
    ),
)


def _latent_attention(fields: ConfigFields, _: int, attention: AttentionConfig) -> AttentionConfig:
    """Return how a layer attends whose keys and values are made of latents."""
    rotary_dim, rope = attention.head_dim, attention.rope
    head_dim = fields.integer("qk_nope_head_dim") + rotary_dim
    assert rope is not None
    if rope.share not in (1.0, rotary_dim / head_dim):
        raise fields.error("partial_rotary_factor", rope.share, "1: all of qk_rope_head_dim is rotated")
    has_neighbours = fields.get("rope_interleave")
    return replace(
        attention,
        num_kv_heads=1,
        head_dim=head_dim,
        v_dim=fields.integer("v_head_dim"),
        rope=with_query_growth(fields, rope),
        scale=head_dim**-0.5 * rope.sharpness**2,
        latent=LatentConfig(
            rank=fields.integer("kv_lora_rank"),
            rotary_dim=rotary_dim,
            query_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        ),
        has_neighbours=has_neighbours is None or fields.flag("rope_interleave"),
    )


def _mistral_attention(fields: ConfigFields, _: int, attention: AttentionConfig) -> AttentionConfig:
    """Return how a layer of Mistral attends; in Mistral's own form, pairs that are rotated lie side by side."""
    assert attention.rope is not None
    rope = with_query_growth(fields, attention.rope)
    return replace(attention, rope=rope, has_neighbours=fields.flag("rope_interleave"))


_ROPE_OF_MISTRAL_4 = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_OF_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_EXPERTS = ExpertFamily(
    names=ExpertNames(shared="shared_experts."),
    normalizes="norm_topk_prob",
    shared="n_shared_experts",
    counts_shared=True,
    has_sigmoid=True,
)
_DEEPSEEK_V3 = Family(
    has_mtp_layer=True,
    head_dim="qk_rope_head_dim",
    qkv_bias="attention_bias",
    attention_output_bias="attention_bias",
    defaults={
        **_OF_DEEPSEEK,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    layer_attention=_latent_attention,
    rotated_share=1.0,
    experts=_DEEPSEEK_EXPERTS,
)

_MISTRAL = Family(
    defaults={"max_position_embeddings": 131072}, windows=Windows(4096), layer_attention=_mistral_attention
)

FAMILIES = {
    # Llama 2 and 3. From 3.1 on the rotary frequencies are stretched, see `raypp.models.layer`.
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    # Mistral and Ministral: Llama's layer, in the first versions with a window; since Ministral 3 queries may grow with
    # the position.
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": replace(_MISTRAL, windows=Windows()),
    # Qwen2 and Qwen2.5.
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        defaults={"max_position_embeddings": 32768},
        windows=Windows(4096, has_switch=True, first_layer=28),
    ),
    # Qwen3, dense.
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        qk_norm=True,
        defaults={"head_dim": 128, "max_position_embeddings": 32768},
        windows=Windows(4096, has_switch=True, first_layer=28),
    ),
    # Qwen3, with experts.
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        qk_norm=True,
        defaults={"max_position_embeddings": 32768},
        windows=Windows(4096, has_switch=True),
        experts=ExpertFamily(normalizes="norm_topk_prob"),
    ),
    # Mixtral: Llama's attention, and experts in all layers.
    "MixtralForCausalLM": Family(
        defaults={"max_position_embeddings": 131072},
        windows=Windows(),
        experts=ExpertFamily(
            names=ExpertNames(block="block_sparse_moe.", gate="w1", up="w3", down="w2"),
            intermediate_size="intermediate_size",
        ),
    ),
    # Qwen3-VL: a vision tower, and Qwen3 with rotary positions along three axes.
    "Qwen3VLForConditionalGeneration": Family(
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        qk_norm=True,
        defaults={"head_dim": 128, "max_position_embeddings": 128000},
        weight_prefix="model.language_model.",
        vision=_QWEN3_VL_TOWER,
    ),
    # Qwen3-VL with experts; its vision tower is the same.
    "Qwen3VLMoeForConditionalGeneration": Family(
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        qk_norm=True,
        defaults={"max_position_embeddings": 128000},
        weight_prefix="model.language_model.",
        vision=_QWEN3_VL_TOWER,
        experts=ExpertFamily(),
    ),
    # Qwen3-Next: gated delta nets and gated attention in turns, with experts.
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5,
        has_joined_projections=True,
        experts=ExpertFamily(normalizes="norm_topk_prob", shared="shared_expert_intermediate_size"),
    ),
    # Qwen3.5, 3.6 and 3.8, by itself and beside a vision tower: Qwen3-VL's, without deepstack.
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5_BESIDE_TOWER,
    "Qwen3_5MoeForCausalLM": replace(_QWEN3_5, experts=_QWEN3_5_EXPERTS),
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5_BESIDE_TOWER, experts=_QWEN3_5_EXPERTS),
    # gpt-oss: sinks, a window in every second layer, biases everywhere, experts with a gate that is cut off.
    "GptOssForCausalLM": Family(
        qkv_bias=True,
        attention_output_bias=True,
        has_sinks=True,
        defaults={
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rope_parameters": _ROPE_OF_GPT_OSS,
            "rms_norm_eps": 1e-5,
        },
        windows=Windows(128, interval=2),
        experts=ExpertFamily(
            names=ExpertNames(router="router"), intermediate_size="intermediate_size", has_pairs=True, gate_limit=7.0
        ),
    ),
    # Gemma 2 and 3: norms before and after, windows, in Gemma 2 soft caps; Gemma 3 beside its tower, too.
    "Gemma2ForCausalLM": replace(
        _GEMMA3,
        qk_norm=False,
        defaults={
            **_OF_GEMMA,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "rope_theta": 1e4,
            _CAP: 50.0,
            LOGIT_CAP: 30.0,
        },
        windows=Windows(4096, interval=2),
        has_local_rope=False,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        weight_prefix="language_model.model.",
        vision=VisionFamily(kind="gemma3", vision_start_token_id=255999),
    ),
    # Gemma 4, dense or with experts beside the MLP: global layers have wider heads, whose values are keys. The 31B and
    # 26B-A4B, with a tower, and the 12B, which has another name and reads text alone; smaller ones have other parts.
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(
        _GEMMA4,
        weight_prefix="model.language_model.",
        vision=VisionFamily(kind="gemma4", vision_start_token_id=255999),
    ),
    "Gemma4UnifiedForConditionalGeneration": replace(
        _GEMMA4,
        weight_prefix="model.language_model.",
        defaults={**_GEMMA4.defaults, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
        windows=Windows(1024, interval=6),
    ),
    # GLM-4.5 to 4.7, with experts: half of a head is rotated, and the first layers are dense.
    "Glm4MoeForCausalLM": Family(
        has_mtp_layer=True,
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
        rotated_share=0.5,
        experts=_DEEPSEEK_EXPERTS,
    ),
    # MiniMax-M2: a norm of all queries of a token at once, and of all its keys.
    "MiniMaxM2ForCausalLM": Family(
        qk_norm=True,
        has_wide_qk_norm=True,
        defaults={"head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6},
        rotated_share=1.0,
        experts=ExpertFamily(
            names=ExpertNames(
                block="block_sparse_moe.", correction="e_score_correction_bias", gate="w1", up="w3", down="w2"
            ),
            intermediate_size="intermediate_size",
            has_sigmoid=True,
        ),
    ),
    # DeepSeek-V2, its experts chosen by a softmax; V3, R1, and Kimi-K2, by sigmoids: keys and values are of latents.
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3,
        has_mtp_layer=False,
        mlp_bias="mlp_bias",
        defaults={**_OF_DEEPSEEK, "max_position_embeddings": 2048},
        experts=replace(_DEEPSEEK_EXPERTS, normalizes=False, has_sigmoid=False, has_groups=True, num_ranking=1),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    # GLM-4.7-Flash: GLM-4.5's experts, and latents.
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        defaults={
            **_OF_DEEPSEEK,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
    ),
    # Mistral Small 4: latents, queries that grow with the position, experts chosen by a softmax.
    "Mistral4ForCausalLM": replace(
        _DEEPSEEK_V3,
        has_mtp_layer=False,
        defaults={
            **_OF_DEEPSEEK,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "max_position_embeddings": 1048576,
            "rope_parameters": _ROPE_OF_MISTRAL_4,
            "norm_topk_prob": True,
        },
        experts=replace(_DEEPSEEK_EXPERTS, has_sigmoid=False, has_groups=True),
    ),
}
"""By the name of the architecture in config.json."""
TEXT_FAMILIES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "KimiK2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
"""By the `model_type` of a `text_config` beside a tower that raypp does not have: the model reads text alone."""
