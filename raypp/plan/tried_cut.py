"""Whether transformers' modules give the same tokens in stages: tried with a small copy before the first start."""

from __future__ import annotations

import logging
from pathlib import Path

from raypp.errors import ModelLoadError, page
from raypp.models.asked import HAS_MEMBERS, asked
from raypp.plan.engine_plan import EnginePlan

_PROGRAM = "raypp.testing.try_decoder"
_LOG = logging.getLogger(__name__)


def require_tried(plan: EnginePlan) -> None:
    """Refuse a plan whose stages compute something else than transformers does; raypp's own layers are not tried.

    A small random model in the shape of this one runs on a CPU, on one stage and on as many layers per stage as are
    planned: seconds the first time, then the answer is known.

    Raises:
        ModelLoadError: other tokens, or it cannot be tried.
    """
    if plan.model.measured is None:
        return
    partition = [stage.num_layers for stage in plan.stages]
    said = ",".join(map(str, partition))
    _LOG.info("%s: transformers' modules are tried with %s layers per stage", plan.config.model.model, said)
    options = (HAS_MEMBERS,) if plan.model.num_members > 1 else ()
    found = asked(_PROGRAM, Path(plan.model_path), said, *options, trusts_code=plan.model.trusts_code)
    name = plan.model.architecture.partition(":")[2]
    if found.get("error"):
        raise ModelLoadError(
            f"{name}: a small copy of the model does not run, so that nothing is known of its stages",
            got=found["error"],
            hint=page("models"),
        )
    if found["whole"]:
        raise ModelLoadError(
            f"{name}: with raypp's attention transformers' modules give other tokens",
            got=found["whole"],
            hint=page("models"),
        )
    if found["cut"]:
        raise ModelLoadError(
            f"{name}: transformers' modules give other tokens when their layers are cut into stages",
            got=f"{said} layers per stage: {found['cut']}",
            expected="layers that take nothing from layers of other stages but the residual stream",
            hint="num_stages=1, or layer_partition with the cut elsewhere",
        )
    if found["members"]:
        raise ModelLoadError(
            f"{name}: transformers' modules give other tokens when members of a stage have parts of their weights",
            got=f"tensor_parallel_size={plan.model.num_members}; of two members {found['members']}",
            expected="a plan of these modules for tensor parallelism that is right",
            hint="tensor_parallel_size=1",
        )
