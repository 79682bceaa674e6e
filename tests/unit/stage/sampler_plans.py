"""Plans that only start rows, and stages that only sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from raypp.messages import BlockGroup, StepPlan, pack, unpack
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.request import Request
from raypp.row_params import Needs
from raypp.scheduler.plan_builder import build_plan
from raypp.scheduler.request_state import RequestState, end_token_ids
from raypp.scheduler.running import Chunk, Cohort, InFlightStep
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_end import Sampler
from raypp.starting_rows import StartingRows

VOCAB_SIZE = 70


def spec(*, max_num_seqs: int = 8, max_drafts: int = 0) -> StageSpec:
    return StageSpec(
        stage_index=0,
        num_stages=1,
        max_steps_per_cohort=2,
        start_layer=0,
        end_layer=1,
        model_path="",
        load_format="dummy",
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        seed=0,
        num_threads=1,
        max_num_seqs=max_num_seqs,
        max_step_rows=max_num_seqs,
        max_step_tokens=1024,
        max_model_len=1024,
        vocab_size=VOCAB_SIZE,
        block_size=16,
        groups=(BlockGroup(100),),
        layer_groups=(0,),
        max_drafts=max_drafts,
        transport="local",
        link_timeout_s=1.0,
        trace=False,
    )


def start_plan(requests: Sequence[Request], rows: Sequence[int]) -> StepPlan:
    """Return a plan that starts requests in rows, as a stage receives it; their output so far is known already."""
    chunks = []
    for request, row in zip(requests, rows, strict=True):
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        state = RequestState(request, 0, 1024, end_token_ids(request), num_tokens, row=row)
        chunks.append(Chunk(state, 0, num_tokens, is_last=True, is_first=True))
    return unpack(StepPlan, pack(build_plan(InFlightStep(0, Cohort(0), 0, [], chunks))))


def sampler_of(spec: StageSpec, device: torch.device) -> Sampler:
    return Sampler(spec, device, RowTokens(spec.max_num_seqs, spec.row_tokens_width, device))


def start(sampler: Sampler, requests: Sequence[Request], rows: Sequence[int]) -> None:
    plan = start_plan(requests, rows)
    sampler.history.tokens.start(plan)
    sampler.start(StartingRows(plan, sampler.rows.tables.seed.device))


def choose(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    needs: Needs | None = None,
) -> list[int]:
    """Return the chosen tokens."""
    needs = sampler.rows.needs(np.array(rows)) if needs is None else needs
    on_device = (torch.tensor(values, device=logits.device) for values in (rows, positions))
    return sampler.choose(logits, *on_device, needs).tolist()


def commit(
    sampler: Sampler,
    rows: Sequence[int],
    positions: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    needs: Needs,
    num_valid: Sequence[int] | None = None,
) -> None:
    """Take in what a step yielded."""
    device = sampler.rows.tables.seed.device
    columns = (torch.tensor(values, device=device) for values in (rows, positions, token_ids))
    counts = None if num_valid is None else torch.tensor(num_valid, device=device)
    if needs & Needs.HISTORY:
        sampler.remember(StepTokens(*columns, counts), counts=True)
