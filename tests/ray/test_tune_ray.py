"""`raypp tune` from the command line to an engine that runs what it wrote."""

from __future__ import annotations

import pytest

from raypp import LLM, SamplingParams
from raypp.cli.main import main

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_what_tune_writes_can_be_run(local_ray, tmp_path, capsys):
    path = tmp_path / "tuned.toml"
    sizes = ["--batch-size", "4", "--context-len", "16", "--temperature", "0"]
    assert main(["tune", "tiny", "--num-stages", "2", *sizes, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    for word in ("layer", "embedding", "LM head", "sampler", "tuned", "even", "expected gain"):
        assert word in printed
    with LLM(str(path)) as llm:
        layers = [stage["num_layers"] for stage in llm.plan()["stages"]]
        assert sum(layers) == 6
        assert layers == llm.config.parallel.layer_partition
        [output] = llm.generate(["def main("], SamplingParams(max_tokens=4, temperature=0.0))
        assert len(output.outputs[0].token_ids) == 4
