"""The series of `metrics.py` under the names and labels that vLLM's server gives them.

For dashboards, autoscalers and routers that were made for it. What vLLM has and raypp does not is left out; its older
names of the same series are among them. Buckets of histograms are raypp's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

VLLM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "raypp_requests_running": ("num_requests_running",),
        "raypp_requests_waiting": ("num_requests_waiting",),
        "raypp_kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "raypp_preemptions": ("num_preemptions",),
        "raypp_prompt_tokens": ("prompt_tokens",),
        "raypp_generated_tokens": ("generation_tokens",),
        "raypp_prefix_query_tokens": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
        "raypp_prefix_hit_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
        "raypp_draft_tokens": ("spec_decode_num_draft_tokens",),
        "raypp_accepted_tokens": ("spec_decode_num_accepted_tokens",),
        "raypp_time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "raypp_inter_token_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "raypp_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "raypp_request_seconds": ("e2e_request_latency_seconds",),
        "raypp_queue_seconds": ("request_queue_time_seconds",),
        "raypp_request_prompt_tokens": ("request_prompt_tokens",),
        "raypp_request_output_tokens": ("request_generation_tokens",),
        "raypp_requests_finished": ("request_success",),
    }
)
"""vLLM's names, without `vllm:`, by raypp's."""

_LABELS = {"model": "model_name", "replica": "engine", "reason": "finished_reason"}


class VllmSeries(Collector):
    """Families of another collector, renamed; those that vLLM does not have are left out."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        """Yield the families that both have, under each of vLLM's names."""
        for family in self._own.collect():
            for name in VLLM_NAMES.get(family.name, ()):
                renamed = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
                    full_name = renamed.name + sample.name.removeprefix(family.name)
                    renamed.samples.append(sample._replace(name=full_name, labels=labels))
                yield renamed
