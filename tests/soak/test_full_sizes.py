"""What `make test` runs in small: the same files with as many examples, kills and settings as are worth an hour.

Each runs in a pytest of its own, whose last line goes into the report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900
FULL: dict[str, dict[str, str]] = {
    "tests/unit/models/test_state_models.py": {"TEST_SIZES": "all"},
    "tests/unit/api/test_client_memory.py": {"TEST_SIZES": "all"},
    "tests/parity/test_shared_kv.py": {"TEST_SIZES": "all"},
    "tests/parity/test_gemma4.py": {"TEST_SIZES": "all"},
    "tests/clients/test_recorded_clients.py": {"TEST_SIZES": "all"},
    "tests/parity/test_speculation.py": {"TEST_SIZES": "all"},
    "tests/parity/test_members_texts.py": {"TEST_SIZES": "all"},
    "tests/parity/test_any_decoder.py": {"TEST_SIZES": "all"},
    "tests/parity/test_decoder_members.py": {"TEST_SIZES": "all"},
    "tests/parity/test_altered_decoders.py": {"TEST_SIZES": "all"},
    "tests/parity/test_quantized_weights.py": {"TEST_SIZES": "all"},
    "tests/parity/test_latent_formats.py": {"TEST_SIZES": "all"},
    "tests/parity/test_mistral_tokens.py": {"TEST_SIZES": "all"},
    "tests/parity/test_windows.py": {"TEST_SIZES": "all"},
    "tests/parity/test_row_states.py": {"TEST_SIZES": "all"},
    "tests/parity/test_mtp.py": {"TEST_SIZES": "all"},
    "tests/parity/test_members.py": {"TEST_SIZES": "all"},
    "tests/parity/test_batch_invariant.py": {"TEST_SIZES": "all"},
    "tests/parity/test_engine_hf.py": {"TEST_SIZES": "all"},
    "tests/parity/test_models_hf.py": {"TEST_SIZES": "all"},
    "tests/parity/test_vision_hf.py": {"TEST_SIZES": "all"},
    "tests/parity/test_gemma_vision.py": {"TEST_SIZES": "all"},
    "tests/parity/test_sampling_params.py": {"TEST_SIZES": "all"},
    "tests/parity/test_tiny_eagle.py": {"TEST_SIZES": "all"},
    "tests/parity/test_cpu_kv.py": {"TEST_SIZES": "all"},
    "tests/parity/test_structured_outputs.py": {"TEST_SIZES": "all"},
    "tests/parity/test_handed_over.py": {"TEST_HANDED_OVER": "20", "TEST_SIZES": "all"},
    "tests/parity/test_request_storm.py": {"STORM_REQUESTS": "400"},
    "tests/parity/test_sampled_text.py": {"SAMPLED_TEXT_DRAWS": "20000"},
    "tests/unit/grammar/test_schema_corpus.py": {"TEST_SIZES": "all"},
    "tests/unit/serve_app/test_hostile_client.py": {"TEST_SIZES": "all"},
    "tests/unit/serve_app/test_page.py": {"TEST_SIZES": "all"},
    "tests/unit/serve_app/test_openapi.py": {"TEST_SCHEMA_EXAMPLES": "100"},
    "tests/unit/graphs/test_same_bits.py": {"TEST_GRAPH_SEEDS": "12", "TEST_SIZES": "all"},
    "tests/unit/ops/test_attention.py": {"TEST_SIZES": "all"},
    "tests/unit/ops/test_kernels.py": {"TEST_SIZES": "all"},
    "tests/unit/ops/test_member_choices.py": {"TEST_SIZES": "all"},
    "tests/unit/ops/test_invariance_check.py": {"TEST_SIZES": "all"},
    "tests/unit/ops/test_kernels_compile.py": {"TEST_SIZES": "all"},
    "tests/unit/ops/test_quantized_models.py": {"TEST_SIZES": "all"},
    "tests/properties/test_items_replay.py": {"TEST_SIZES": "all"},
    "tests/properties/test_scheduler_replay.py": {"TEST_SIZES": "all"},
    "tests/unit/driver/test_not_finite.py": {"TEST_SIZES": "all"},
    "tests/unit/specdec/test_verify.py": {"TEST_SIZES": "all"},
    "tests/unit/stage/test_recorded_experts.py": {"TEST_SIZES": "all"},
    "tests/unit/scheduler/test_drafts.py": {"TEST_SIZES": "all"},
    "tests/unit/api/test_poison_requests.py": {"TEST_SIZES": "all"},
    "tests/unit/models/test_compiled_layers.py": {"TEST_SIZES": "all"},
    "tests/unit/models/test_member_sizes.py": {"TEST_SIZES": "all"},
    "tests/unit/models/test_own_layers.py": {"TEST_SIZES": "all"},
    "tests/unit/ops/test_sampling.py": {"TEST_SIZES": "all"},
    "tests/unit/batch_job/test_stoppable.py": {"TEST_SIZES": "all"},
    "tests/unit/plan/test_traffic.py": {"TEST_SIZES": "all"},
    "tests/unit/benchmarks/test_mixed_traffic.py": {"TEST_SIZES": "all"},
    "tests/unit/benchmarks/test_stage_limit.py": {"TEST_SIZES": "all"},
    "tests/unit/serve_app/test_freed_memory.py": {"TEST_SIZES": "all"},
    "tests/unit/supervision/test_restart_on_purpose.py": {"TEST_SIZES": "all"},
    "tests/unit/stage/test_recorded_decode.py": {"TEST_SIZES": "all"},
    "tests/unit/stage/test_recorded_needs.py": {"TEST_SIZES": "all"},
    "tests/unit/stage/test_sampler.py": {"TEST_SIZES": "all"},
    "tests/unit/stage/test_speculation_ends.py": {"TEST_SIZES": "all"},
    "tests/unit/stage/test_step_sizes.py": {"TEST_SIZES": "all"},
    "tests/unit/test_dry_cuda.py": {"TEST_SIZES": "all"},
    "tests/unit/test_pytest_limits.py": {"TEST_SIZES": "all"},
    "tests/unit/api/test_recovery_whole.py": {"TEST_RECOVERIES": "6"},
    "tests/ray/test_encoders_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_faults.py": {"FAULT_KILLS": "8", "TEST_SIZES": "all"},
    "tests/ray/test_members_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_nodes.py": {"TEST_SIZES": "all"},
    "tests/ray/test_parity_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_leftovers.py": {"TEST_SIZES": "all"},
    "tests/ray/test_notebook_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_pipelining.py": {"TEST_SIZES": "all"},
    "tests/ray/test_serve_app.py": {"TEST_SIZES": "all"},
    "tests/ray/test_speculation_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_batch_ray_job.py": {"TEST_SIZES": "all"},
    "tests/ray/test_links_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_serve_encoder.py": {"TEST_SIZES": "all"},
    "tests/ray/test_sampling_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_tune_ray.py": {"TEST_SIZES": "all"},
    "tests/ray/test_slow_agents.py": {"TEST_SIZES": "all"},
    "tests/ray/test_restarts.py": {"RESTART_KILLS": "12", "TEST_SIZES": "all"},
    "tests/ray/test_cluster.py": {"FAULT_NODES": "1", "TEST_SIZES": "all"},
    "tests/ray/test_batch.py": {"TEST_BATCH_LINES": "3000", "TEST_BATCH_KILLS": "8", "TEST_SIZES": "all"},
}


_PART_OF = {"clients": "clients", "parity": "models", "properties": "sizes", "ray": "chaos", "unit": "sizes"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.part(_PART_OF[name.split("/")[1]])) for name in FULL]
)
def test_in_full(name: str, note: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-o", "faulthandler_timeout=600", name]
    environment = os.environ | FULL[name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    last = done.stdout.rstrip().rpartition("\n")[2]
    note(f"`{name}` with {', '.join(f'{key}={value}' for key, value in FULL[name].items())}: {last}")
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"  # where a test hung is in the latter
