"""`raypp info`: does it fit?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from raypp.cli.info import fit_lines
from raypp.cli.main import main
from raypp.config.engine_config import EngineConfig
from raypp.plan.fit import describe_fit
from raypp.plan.hardware import Hardware, Machine, read_machines

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


def _info(model: str, *options: str) -> int:
    return main(["info", str(_SHAPES / model), *options])


def _lines(model: str, gpus: str, **settings: object) -> list[str]:
    config = EngineConfig.from_flat(_SHAPES / model, **settings)
    return list(fit_lines(describe_fit(config, read_machines(gpus))["fit"]))


def test_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert _info("qwen3-8b", "--num-stages", "2", "--gpus", "2x24GB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("qwen3-8b (Qwen3ForCausalLM, bfloat16), 2 stages on 2 GPUs of 22.35 GiB")
    assert lines[2] == "It fits. KV cache: 133,536 tokens: 16 requests of 8,192 tokens."
    header = lines.index("memory per stage, GiB") + 1
    columns = "stage layers GPU may use weights a step graphs libraries KV cache left"
    assert " ".join(lines[header].split()) == columns
    assert lines[header + 1].split()[:5] == ["0", "0-18", "22.35", "20.12", "7.99"]
    assert ["8,192", "16", "KV", "cache"] in [line.split() for line in lines]
    assert [line.split()[1] for line in lines if line.startswith("Estimates:")] == ["CUDA", "tokens/s,", "the"]


def test_blocks_in_cpu_memory_are_said() -> None:
    place = "in each stage's machine up to 32.00 GiB of main memory, page-locked."
    assert f"KV of 441,504 tokens that had to make room: {place}" in _lines(
        "qwen3-8b", "2x141GB", num_stages=2, cpu_kv_bytes=32 << 30
    )
    assert not any("make room" in line for line in _lines("qwen3-8b", "2x141GB", num_stages=2))
    with_states = _lines("qwen3.6-27b", "2x141GB", num_stages=2, cpu_kv_bytes=32 << 30)
    [line] = [line for line in with_states if "make room" in line]
    assert "snapshots of states that had to make room: in each stage's machine up to 3" in line


def test_stages_and_members_are_advised() -> None:
    lines = _lines("qwen3-8b", "2x24GB")
    rows = [line.split() for line in lines]
    assert ["stages", "members", "room", "of", "1", "of", "all"] in rows
    assert ["1", "2", "KV", "cache"] in [row[:4] for row in rows]
    assert "raypp would take --num-stages 1 --tensor-parallel-size 2: most tokens/s of all that run at once," in lines
    assert any("with NVLink between members" in line for line in lines)
    assert not any("would take" in line for line in _lines("qwen3-8b", "1x24GB")), "there is no choice"
    assert not any("would take" in line for line in _lines("qwen3-32b", "2x24GB")), "none fits"
    assert ["2", "1", "does", "not", "fit"] in [line.split() for line in _lines("qwen3-32b", "2x24GB")]


def test_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert _info("qwen3-32b", "--num-stages", "2", "--gpus", "2x24GB") == 1
    out = capsys.readouterr().out
    assert "It does not fit: stage 0 does not fit its share of a GPU." in out
    assert "  got: 20.12 GiB of 22.35: weights 3" in out
    assert "what would fit\n  --num-stages 4, with 2 more GPUs like these: KV cache 30,208 tokens, 3 requests" in out


def test_smaller_settings_are_options() -> None:
    text = "\n".join(_lines("qwen3-8b", "1x24GB", max_model_len=32768))
    assert "  got: " in text
    assert "  --num-stages 2, with 1 more GPU like these: KV cache 133,536 tokens, 16 requests of 8,192 tokens" in text
    assert "  --max-model-len 11" in text


def test_what_limits_requests_and_their_length() -> None:
    lines = _lines("qwen3-8b", "1x24GB", max_num_seqs=4)
    assert "A request may have 20,208 tokens, for the KV cache holds no more; the model takes 40,960." in lines
    rows = [line.split() for line in lines]
    assert ["2,048", "4", "max_num_seqs"] in rows


def test_machines_and_their_stages() -> None:
    lines = _lines("qwen3-14b", "2x24GB+2x24GB", num_stages=4)
    assert lines[0].endswith("4 stages on 2 machines with 2 GPUs of 22.35 GiB")
    assert any(line.startswith("2 machines: one Ray cluster over them") for line in lines)
    sent = "A token takes 10,240 bytes from a stage to the next on another machine"
    assert f"{sent}: 10 Gb/s carry 122,070 tokens/s of prompts." in lines
    members = _lines("qwen3-14b", "2x24GB+2x24GB", num_stages=2, tensor_parallel_size=2)
    assert f"{sent}, 5,120 from each of 2 members: 10 Gb/s carry 122,070 tokens/s of prompts." in members
    mixed = _lines("qwen3-8b", "1x24GB+1x80GB", num_stages=2)
    assert mixed[0].endswith("on 1 machine with 1 GPU of 22.35 GiB and 1 machine with 1 GPU of 74.51 GiB")
    assert "Stage 1 is the fullest: it sets how many KV blocks all stages have." in mixed
    one_machine = _lines("qwen3-8b", "2x24GB+80GB")
    assert one_machine[0].endswith("1 stage on 2 GPUs of 22.35 GiB and 1 GPU of 74.51 GiB")
    assert any(line.startswith("GPUs differ: stages that do not take all") for line in one_machine)


def test_an_encoder_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert _info("qwen3-vl-8b", "--num-stages", "2", "--gpus", "3x24GB") == 0
    assert "Besides, 1 encoder for images, each with 1 GPU (20.12 GiB)." in capsys.readouterr().out


def test_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["info", "tiny", "--num-stages", "2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny (Qwen3ForCausalLM, float32), 2 stages on CPUs"
    assert lines[2].startswith("It fits. KV cache: ")
    header = lines.index("memory per stage, GiB") + 1
    assert lines[header].split() == ["stage", "layers", "machine", "weights", "KV", "cache", "left"]


def test_stages_share_the_one_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a cluster is named, which may have more."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Hardware, "of_this_machine", lambda: Hardware(2, 24 << 30, machines=(Machine(()),)))
    options = ("--num-stages", "2", "--device", "cpu")
    assert _info("qwen3-8b", *options) == 1
    out = capsys.readouterr().out
    assert "It does not fit: the stages together do not fit this machine's memory.\n  got: 24.00 GiB" in out
    assert "No smaller settings fit.\n  more machines, in one Ray cluster" in out
    monkeypatch.setattr(Hardware, "of_this_machine", lambda: Hardware(2, 32 << 30, machines=(Machine(()),)))
    assert _info("qwen3-8b", *options) == 0  # weights 30.5 GiB, KV blocks 0.5
    capsys.readouterr()
    for name, other in (("--kv-cache-bytes", "--kv-cache-bytes 536870912"), ("--cpu-kv-bytes", "--cpu-kv-bytes 0")):
        assert _info("qwen3-8b", *options, name, str(1 << 30)) == 1
        assert f"what would fit\n  {other}: KV cache" in capsys.readouterr().out
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert _info("qwen3-8b", *options, "--kv-cache-bytes", str(1 << 30)) == 0
    assert "and one such machine has 32.00: use several." in capsys.readouterr().out


def test_gpus_without_their_packages_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["info", "tiny"]) == 0
    assert "On CPUs: this machine has GPUs (2), but raypp cannot use them without" in capsys.readouterr().out
    assert main(["info", "tiny", "--device", "cuda"]) == 2
    assert 'pip install ".[gpu]" in the clone of raypp' in capsys.readouterr().err
    assert main(["info", "tiny", "--device", "cpu"]) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["info", "tiny"]) == 0
    assert "GPU" not in capsys.readouterr().out


def test_the_whole_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert _info("qwen3-32b", "--gpus", "1x24GB", "--json") == 1
    description = json.loads(capsys.readouterr().out)
    assert (description["plan"], description["fit"]["fits"]) == (None, False)
    assert description["hardware"]["num_gpus"] == 1
    assert _info("qwen3-8b", "--gpus", "1x24GB", "--full") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    num_stages: 1" in lines
    assert any(line.startswith("It fits.") for line in lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "H100"], ["--gpus does not describe GPUs", "got: H100", "e.g. 4x80GB"]),
        (["--gpus", "1x24GB", "--start"], ["--start and --gpus exclude each other", "hint: "]),
        (["--tool-call-parser", "foo"], ["unknown syntax", "got: foo"]),
        (["--trace", "/nosuch/x.json"], ["/nosuch/x.json", "hint: mkdir -p /nosuch"]),
        (["--gpus", "2x80GB", "--max-model-len", "131072"], ["at most 40960", "hint: rope_scaling"]),
    ],
)
def test_mistakes(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _info("qwen3-8b", *options) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words)
