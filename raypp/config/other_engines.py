"""What raypp has in place of the settings of other engines: for error messages, and a section of docs/configuration.md.

A name that raypp has itself is in no table, even where it means a little less or more elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class InPlace(NamedTuple):
    """What raypp has in place of another engine's setting."""

    setting: str | None
    """As `section.name`; None: nothing."""
    about: str = ""
    """More about it; without a setting, what to do."""

    def text(self, setting: str | None) -> str:
        """Return what to do, the setting written as it is to be given."""
        if setting is None:
            return self.about
        return f"use {setting} ({self.about})" if self.about else f"use {setting}"


_NO_ADAPTERS = InPlace(None, "merge adapters into the weights: raypp has none")
_NOT_CHOSEN = InPlace(None, "leave it out: each device has its own kernels")
_COMPILERS = InPlace(None, "leave it out: schemas have two compilers, which are both used")
_BY_RAY = InPlace(None, "leave it out: Ray knows the nodes of its cluster")
_ALWAYS_CHUNKED = InPlace(None, "leave it out: prompts are always computed in chunks, `max_num_batched_tokens` a step")
_REPLICAS = InPlace("http.num_replicas", "several engines share the requests")
_EAGER = InPlace("graphs.mode", "with none, there are no CUDA graphs")
_MODEL = InPlace(None, "name the model without an option: raypp serve MODEL")
_LOG_LEVEL = InPlace(None, "set the variable RAYPP_LOG_LEVEL")
_LAYERS_OF_STAGES = InPlace("parallel.layer_partition", "it says how many layers each stage has on its device")
_DRAFT_MODEL = InPlace("speculative.model", "it names an EAGLE head")

OF_VLLM: Mapping[str, InPlace] = MappingProxyType(
    {
        "pipeline_parallel_size": InPlace("parallel.num_stages"),
        "data_parallel_size": _REPLICAS,
        "enforce_eager": _EAGER,
        "compilation_config": InPlace("graphs.mode", "the other settings of graphs are options, too"),
        "swap_space": InPlace("cache.cpu_kv_bytes"),
        "cpu_offload_gb": InPlace("parallel.num_stages", "more devices hold more; weights are not kept in CPU memory"),
        "kv_cache_memory_bytes": InPlace("cache.kv_cache_bytes"),
        "num_gpu_blocks_override": InPlace("cache.num_kv_blocks"),
        "enable_chunked_prefill": _ALWAYS_CHUNKED,
        "scheduling_policy": InPlace(None, "leave it out: of requests, the smaller `priority` goes first"),
        "speculative_config": InPlace("speculative.method", "the other settings of speculation are options, too"),
        "enable_lora": _NO_ADAPTERS,
        "lora_modules": _NO_ADAPTERS,
        "max_loras": _NO_ADAPTERS,
        "max_lora_rank": _NO_ADAPTERS,
        "enable_auto_tool_choice": InPlace(
            "model.tool_call_parser", "with auto, the default, tools work wherever the syntax of calls is known"
        ),
        "enable_reasoning": InPlace("model.reasoning_parser", "with auto, the default, thoughts are told apart"),
        "guided_decoding_backend": _COMPILERS,
        "structured_outputs_config": _COMPILERS,
        "tokenizer": InPlace(None, "leave it out: the tokenizer is the model's own"),
        "tokenizer_mode": InPlace(None, "leave it out: the tokenizer is the model's own"),
        "hf_overrides": InPlace("model.rope_scaling", "it replaces that field; others cannot be replaced"),
        "task": InPlace(None, "leave it out: models generate text"),
        "runner": InPlace(None, "leave it out: models generate text"),
        "limit_mm_per_prompt": InPlace("images.max_images_per_prompt"),
        "mm_processor_kwargs": InPlace(None, "leave it out: images are read as the model was trained"),
        "distributed_executor_backend": InPlace(None, "leave it out: stages are always actors of Ray"),
        "attention_backend": _NOT_CHOSEN,
        "disable_log_requests": InPlace(None, "leave it out: requests are not logged"),
        "enable_log_requests": InPlace(None, "leave it out: requests are not logged; /metrics counts them"),
        "disable_log_stats": InPlace(None, "leave it out: /metrics has figures, the log has none"),
        "uvicorn_log_level": _LOG_LEVEL,
        "api_key": InPlace("http.api_key_file", "it names a file with a key per line"),
        "allowed_origins": InPlace("http.cors_origins"),
    }
)

OF_SGLANG: Mapping[str, InPlace] = MappingProxyType(
    {
        "model_path": _MODEL,
        "pp_size": InPlace("parallel.num_stages"),
        "tp_size": InPlace("parallel.tensor_parallel_size", "each stage has so many members"),
        "dp_size": _REPLICAS,
        "ep_size": InPlace("parallel.enable_expert_parallel", "the members of a stage share its experts"),
        "nnodes": _BY_RAY,
        "node_rank": _BY_RAY,
        "dist_init_addr": _BY_RAY,
        "context_length": InPlace("model.max_model_len"),
        "mem_fraction_static": InPlace("cache.gpu_memory_utilization"),
        "max_total_tokens": InPlace("cache.num_kv_blocks", "each has `block_size` tokens"),
        "page_size": InPlace("cache.block_size"),
        "disable_radix_cache": InPlace(
            "cache.enable_prefix_caching", "switch it off: false, or --no-enable-prefix-caching"
        ),
        "max_running_requests": InPlace("scheduler.max_num_seqs"),
        "chunked_prefill_size": InPlace("scheduler.max_num_batched_tokens"),
        "schedule_policy": InPlace(None, "leave it out: of requests, the smaller `priority` goes first"),
        "disable_cuda_graph": _EAGER,
        "enable_torch_compile": InPlace("graphs.compile"),
        "speculative_algorithm": InPlace("speculative.method"),
        "speculative_draft_model_path": _DRAFT_MODEL,
        "speculative_num_draft_tokens": InPlace("speculative.num_speculative_tokens"),
        "random_seed": InPlace("model.seed", "it holds for requests that bring none of their own"),
        "lora_paths": _NO_ADAPTERS,
        "sampling_backend": _NOT_CHOSEN,
        "grammar_backend": _COMPILERS,
        "enable_metrics": InPlace(None, "leave it out: /metrics is always there"),
        "log_level": _LOG_LEVEL,
    }
)

OF_LLAMA_CPP: Mapping[str, InPlace] = MappingProxyType(
    {
        "hf_repo": _MODEL,
        "ctx_size": InPlace("model.max_model_len"),
        "n_gpu_layers": _LAYERS_OF_STAGES,
        "gpu_layers": _LAYERS_OF_STAGES,
        "tensor_split": InPlace("parallel.layer_partition"),
        "split_mode": InPlace("parallel.num_stages", "models are always split by layers"),
        "threads": InPlace("parallel.stage_num_threads"),
        "parallel": InPlace("scheduler.max_num_seqs"),
        "batch_size": InPlace("scheduler.max_num_batched_tokens"),
        "ubatch_size": InPlace("scheduler.max_num_batched_tokens"),
        "cont_batching": InPlace(None, "leave it out: requests are always batched as they come"),
        "cache_type_k": InPlace("cache.kv_cache_dtype"),
        "cache_type_v": InPlace("cache.kv_cache_dtype"),
        "flash_attn": _NOT_CHOSEN,
        "mlock": InPlace(None, "leave it out: weights are read into memory once"),
        "no_mmap": InPlace(None, "leave it out: weights are read into memory once"),
        "model_draft": _DRAFT_MODEL,
        "draft_max": InPlace("speculative.num_speculative_tokens"),
        "lora": _NO_ADAPTERS,
        "alias": InPlace("http.served_model_name"),
        "jinja": InPlace(None, "leave it out: chat templates are always Jinja"),
        "reasoning_format": InPlace("model.reasoning_parser"),
        "mmproj": InPlace(None, "leave it out: the vision tower is in the model's own checkpoint"),
        "metrics": InPlace(None, "leave it out: /metrics is always there"),
    }
)

OF_OTHER_ENGINES: Mapping[str, InPlace] = MappingProxyType({**OF_VLLM, **OF_SGLANG, **OF_LLAMA_CPP})
"""Of all of them."""

SHORT_OF_OTHER_ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "-pp": "pipeline_parallel_size",
        "-tp": "tp_size",
        "-dp": "data_parallel_size",
        "--tp": "tp_size",
        "--pp": "pp_size",
        "--dp": "dp_size",
        "--ep": "ep_size",
        "--seed": "random_seed",
        "-m": "model_path",
        "-hf": "hf_repo",
        "-c": "ctx_size",
        "-ngl": "n_gpu_layers",
        "-ts": "tensor_split",
        "-sm": "split_mode",
        "-t": "threads",
        "-np": "parallel",
        "-b": "batch_size",
        "-ub": "ubatch_size",
        "-ctk": "cache_type_k",
        "-ctv": "cache_type_v",
        "-fa": "flash_attn",
        "-md": "model_draft",
        "-a": "alias",
        "--temp": "temperature",
        "--repeat-penalty": "repetition_penalty",
        "--n-predict": "max_tokens",
    }
)
"""Short options, and the long ones, or the fields of requests, that they stand for."""
