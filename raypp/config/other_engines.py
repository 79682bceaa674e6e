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

    def text(self, setting: str | None) -> str:
        """Return it in words, the setting written as it is to be given."""
        return " ".join(part for part in (setting, self.about) if part)


_NO_ADAPTERS = InPlace(None, "nothing: there are no adapters; merge them into the weights")
_NOT_CHOSEN = InPlace(None, "nothing to choose: each device has its own kernels")
_COMPILERS = InPlace(None, "nothing to choose: schemas have two compilers, which are both used")
_BY_RAY = InPlace(None, "nothing: Ray knows the nodes of its cluster, docs/several_machines.md")
_ALWAYS_CHUNKED = InPlace(None, "nothing: prompts are always computed in chunks, `max_num_batched_tokens` a step")
_NO_TENSOR_PARALLELISM = InPlace("parallel.num_stages", "by layers; raypp has no tensor parallelism")
_REPLICAS = InPlace("http.num_replicas", "for engines that share the requests")
_EAGER = InPlace("graphs.mode", "none: no CUDA graphs are recorded")
_MODEL = InPlace(None, "the model without an option: raypp serve MODEL")
_LOG_LEVEL = InPlace(None, "the variable RAYPP_LOG_LEVEL")
_DRAFT_MODEL = InPlace("speculative.model", "for an EAGLE head")

OF_VLLM: Mapping[str, InPlace] = MappingProxyType(
    {
        "pipeline_parallel_size": InPlace("parallel.num_stages"),
        "tensor_parallel_size": _NO_TENSOR_PARALLELISM,
        "data_parallel_size": _REPLICAS,
        "enable_expert_parallel": InPlace(None, "nothing: the experts of a layer are on its stage"),
        "enforce_eager": _EAGER,
        "compilation_config": InPlace("graphs.mode", "and the other settings of graphs"),
        "swap_space": InPlace("cache.cpu_kv_bytes"),
        "cpu_offload_gb": InPlace("parallel.num_stages", "over more devices; weights are not kept in CPU memory"),
        "kv_cache_memory_bytes": InPlace("cache.kv_cache_bytes"),
        "num_gpu_blocks_override": InPlace("cache.num_kv_blocks"),
        "enable_chunked_prefill": _ALWAYS_CHUNKED,
        "scheduling_policy": InPlace(None, "nothing to choose: smaller `priority` of a request goes first"),
        "speculative_config": InPlace("speculative.method", "and the other settings of speculation"),
        "enable_lora": _NO_ADAPTERS,
        "lora_modules": _NO_ADAPTERS,
        "max_loras": _NO_ADAPTERS,
        "max_lora_rank": _NO_ADAPTERS,
        "enable_auto_tool_choice": InPlace(
            "model.tool_call_parser", "auto, the default: tools work wherever the syntax of calls is known"
        ),
        "enable_reasoning": InPlace("model.reasoning_parser", "auto, the default: thoughts are told apart"),
        "guided_decoding_backend": _COMPILERS,
        "structured_outputs_config": InPlace(
            None, "nothing to choose: schemas have two compilers, which are both used"
        ),
        "tokenizer": InPlace(None, "nothing: the tokenizer is the model's own"),
        "tokenizer_mode": InPlace(None, "nothing: the tokenizer is the model's own"),
        "hf_overrides": InPlace("model.rope_scaling", "for that field; others cannot be replaced"),
        "task": InPlace(None, "nothing: models generate text"),
        "runner": InPlace(None, "nothing: models generate text"),
        "limit_mm_per_prompt": InPlace("images.max_images_per_prompt"),
        "mm_processor_kwargs": InPlace(None, "nothing: images are read as the model was trained"),
        "trust_remote_code": InPlace(None, "nothing: code in a checkpoint is never run"),
        "distributed_executor_backend": InPlace(None, "nothing: stages are always actors of Ray"),
        "attention_backend": _NOT_CHOSEN,
        "disable_log_requests": InPlace(None, "nothing to switch off: requests are not logged"),
        "enable_log_requests": InPlace(None, "nothing: requests are not logged; answers have ids, /metrics counts"),
        "disable_log_stats": InPlace(None, "nothing to switch off: /metrics has figures, the log has none"),
        "uvicorn_log_level": _LOG_LEVEL,
        "api_key": InPlace("http.api_key_file", "with a key per line"),
        "allowed_origins": InPlace("http.cors_origins"),
    }
)

OF_SGLANG: Mapping[str, InPlace] = MappingProxyType(
    {
        "model_path": _MODEL,
        "pp_size": InPlace("parallel.num_stages"),
        "tp_size": _NO_TENSOR_PARALLELISM,
        "dp_size": _REPLICAS,
        "ep_size": InPlace(None, "nothing: the experts of a layer are on its stage"),
        "nnodes": _BY_RAY,
        "node_rank": _BY_RAY,
        "dist_init_addr": _BY_RAY,
        "context_length": InPlace("model.max_model_len"),
        "mem_fraction_static": InPlace("cache.gpu_memory_utilization"),
        "max_total_tokens": InPlace("cache.num_kv_blocks", "of `block_size` tokens each"),
        "page_size": InPlace("cache.block_size"),
        "disable_radix_cache": InPlace("cache.enable_prefix_caching", "off: --no-enable-prefix-caching, or false"),
        "max_running_requests": InPlace("scheduler.max_num_seqs"),
        "chunked_prefill_size": InPlace("scheduler.max_num_batched_tokens"),
        "schedule_policy": InPlace(None, "nothing to choose: smaller `priority` of a request goes first"),
        "disable_cuda_graph": _EAGER,
        "enable_torch_compile": InPlace("graphs.compile"),
        "speculative_algorithm": InPlace("speculative.method"),
        "speculative_draft_model_path": _DRAFT_MODEL,
        "speculative_num_draft_tokens": InPlace("speculative.num_speculative_tokens"),
        "random_seed": InPlace("model.seed"),
        "lora_paths": _NO_ADAPTERS,
        "sampling_backend": _NOT_CHOSEN,
        "grammar_backend": _COMPILERS,
        "enable_metrics": InPlace(None, "nothing to switch on: /metrics is always there"),
        "log_level": _LOG_LEVEL,
    }
)

OF_LLAMA_CPP: Mapping[str, InPlace] = MappingProxyType(
    {
        "hf_repo": _MODEL,
        "ctx_size": InPlace("model.max_model_len"),
        "n_gpu_layers": InPlace("parallel.layer_partition", "for the layers of each stage; all are on its device"),
        "gpu_layers": InPlace("parallel.layer_partition", "for the layers of each stage; all are on its device"),
        "tensor_split": InPlace("parallel.layer_partition"),
        "split_mode": InPlace("parallel.num_stages", "by layers; there is no other way"),
        "threads": InPlace("parallel.stage_num_threads"),
        "parallel": InPlace("scheduler.max_num_seqs"),
        "batch_size": InPlace("scheduler.max_num_batched_tokens"),
        "ubatch_size": InPlace("scheduler.max_num_batched_tokens"),
        "cont_batching": InPlace(None, "nothing to switch on: requests are always batched as they come"),
        "cache_type_k": InPlace("cache.kv_cache_dtype"),
        "cache_type_v": InPlace("cache.kv_cache_dtype"),
        "flash_attn": _NOT_CHOSEN,
        "mlock": InPlace(None, "nothing: weights are read into memory once"),
        "no_mmap": InPlace(None, "nothing: weights are read into memory once"),
        "model_draft": _DRAFT_MODEL,
        "draft_max": InPlace("speculative.num_speculative_tokens"),
        "lora": _NO_ADAPTERS,
        "alias": InPlace("http.served_model_name"),
        "jinja": InPlace(None, "nothing to switch on: chat templates are always Jinja"),
        "reasoning_format": InPlace("model.reasoning_parser"),
        "mmproj": InPlace(None, "nothing: the vision tower is in the model's own checkpoint"),
        "metrics": InPlace(None, "nothing to switch on: /metrics is always there"),
    }
)

OF_OTHER_ENGINES: Mapping[str, InPlace] = MappingProxyType({**OF_VLLM, **OF_SGLANG, **OF_LLAMA_CPP})
"""Of all of them."""

SHORT_OF_OTHER_ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "-pp": "pipeline_parallel_size",
        "-tp": "tensor_parallel_size",
        "-dp": "data_parallel_size",
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
    }
)
"""Short options, and the long ones that they stand for."""
