"""Linear layers as checkpoints store them in few bits: written bit by bit, from the published layouts.

Nothing here shares code with `raypp.models.weight_formats`, which reads them.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_GROUP = 8
_BLOCK = (12, 20)  # which divides few sizes
_CODE_BITS, _CODES = 4, 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_EXPERTS = ("gate_up_proj", "down_proj")
"""Tensors of all experts, where they are no layers of each."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def _compressed(form: str, **weights: object) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"dynamic": False, "symmetric": True, "actorder": None, **weights},
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _fp8(**more: object) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **more}


def _float8(**weights: object) -> dict[str, Any]:
    return _compressed("float-quantized", num_bits=8, type="float", **weights)


def _int4(**weights: object) -> dict[str, Any]:
    return _compressed("pack-quantized", num_bits=4, type="int", **weights)


def _gptq(**more: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False, **more}


def _auto_round(packing: str) -> dict[str, Any]:
    whole = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int", "autoround_version": "0.9"}
    return {**whole, "bits": 4, "group_size": _GROUP, "sym": True, "extra_config": {"lm_head": {"bits": 16}}}


CONFIGS = {
    "fp8 blocks": _fp8(weight_block_size=list(_BLOCK), modules_to_not_convert=["lm_head"]),
    "fp8 tensor": _fp8(activation_scheme="static"),
    "compressed fp8 tensor": _float8(strategy="tensor"),
    "compressed fp8 channel": _float8(strategy="channel"),
    "compressed fp8 blocks": _float8(strategy="block", block_structure=list(_BLOCK)),
    "compressed fp8 groups": _float8(strategy="group", group_size=_GROUP),
    "compressed int4": _int4(strategy="group", group_size=_GROUP),
    "compressed int4 zeros": _int4(strategy="group", group_size=_GROUP, symmetric=False, actorder="weight"),
    "compressed int4 channel": _int4(strategy="channel", symmetric=False),
    "compressed int4 order": _int4(strategy="group", group_size=_GROUP, actorder="group"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    "gptq": _gptq(lm_head=False),
    "gptq channel": _gptq(group_size=-1, desc_act=True),
    "gptq zeros": _gptq(sym=False),
    "gptq order": _gptq(desc_act=True),
    "gptq v2 zeros order": _gptq(sym=False, desc_act=True, checkpoint_format="gptq_v2"),
    "auto-round gptq": _auto_round("auto_round:auto_gptq"),
    "auto-round awq": _auto_round("auto_round:auto_awq"),
    "int8 channel": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int8 packed": _compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "int8 groups": _compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=_GROUP),
    "mxfp4": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "nvfp4": _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head*"]},
    "fp8 static": _fp8(activation_scheme="static", weight_block_size=None, modules_to_not_convert=["lm_head"]),
    "compressed int4 of 32": _int4(strategy="group", group_size=32),
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
"""By a name of our own, the `quantization_config` of checkpoints whose tensors `quantized_layer` writes."""


def quantized_layer(form: str, weight: torch.Tensor, order_seed: int = 0) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a linear layer's tensors by the ends of their names, and the values that they stand for, [N, K] float32.

    Args:
        form: A key of `CONFIGS`.
        weight: [N, K] float32.
        order_seed: Of which group each input is, where that is up to the layer.
    """
    config = CONFIGS[form]
    if "fp4" in form:
        return _four_bit_floats(form, weight)
    if "fp8" in form or "int8" in form:
        return _eight_bits(form, config, weight)
    return _four_bits(form, config, weight, order_seed)


def _eight_bits(
    form: str, config: dict[str, Any], weight: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    (num_outputs, num_inputs), is_compressed = weight.shape, "config_groups" in config
    scheme = config["config_groups"]["group_0"]["weights"] if is_compressed else config
    structure = scheme.get("block_structure" if is_compressed else "weight_block_size")
    rows, columns = {
        "channel": (1, num_inputs),
        "group": (1, _GROUP),
        "block": structure,
    }.get(scheme.get("strategy", "block" if structure else "tensor"), (num_outputs, num_inputs))
    dtype, largest = (torch.int8, 127) if scheme.get("type") == "int" else (torch.float8_e4m3fn, 448)
    scale = torch.zeros(math.ceil(num_outputs / rows), math.ceil(num_inputs / columns))
    data, values = torch.zeros(weight.shape, dtype=dtype), torch.zeros(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = (weight[block].abs().max() / largest).bfloat16()
            exact = weight[block] / scale[i, j]
            data[block] = exact.round().clamp(-127, 127).to(dtype) if largest == 127 else exact.to(dtype)
            values[block] = data[block].float() * scale[i, j]
    if form == "int8 packed":
        padded = torch.nn.functional.pad(data.int() + 128, (0, -num_inputs % 4), value=128).tolist()
        words = [[sum(row[k + i] << 8 * i for i in range(4)) for k in range(0, len(row), 4)] for row in padded]
        signed = [[word - (1 << 32) if word >= 1 << 31 else word for word in row] for row in words]
        return {"weight_packed": torch.tensor(signed, dtype=torch.int32), "weight_scale": scale.bfloat16()}, values
    if is_compressed:
        stored = scale.reshape(1) if scheme["strategy"] == "tensor" else scale
        return {"weight": data, "weight_scale": stored.bfloat16()}, values
    if structure:
        return {"weight": data, "weight_scale_inv": scale}, values
    if form == "fp8 static":
        return {"weight": data, "weight_scale_inv": scale.reshape(()), "activation_scale": torch.ones(())}, values
    return {"weight": data, "weight_scale": scale.reshape(()), "input_scale": torch.ones(())}, values


def _four_bit_floats(form: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    num_outputs, num_inputs = weight.shape
    group = 32 if form == "mxfp4" else 16
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    between = (positive[1:] + positive[:-1]) / 2
    whole = float(weight.abs().max() / (6 * 448))
    multiplies = torch.tensor(whole)  # of modelopt's; compressed-tensors' divides
    divides = torch.tensor(1 / whole)
    stored, values, packed = [], torch.zeros(weight.shape), []
    for n in range(num_outputs):
        scales, codes = [], []
        for start in range(0, num_inputs, group):
            part = weight[n, start : start + group]
            wanted = float(part.abs().max()) / 6
            if form == "mxfp4":
                exponent = math.ceil(math.log2(wanted))
                scales.append(exponent + 127)
                scale = 2.0**exponent
            else:
                rounded = torch.tensor(wanted / whole).to(torch.float8_e4m3fn).float()
                scales.append(float(rounded))
                scale = float(rounded / divides if form == "nvfp4" else rounded * multiplies)
            nearest = torch.bucketize(part.abs().double() / scale, between)
            values[n, start : start + group] = torch.copysign(positive[nearest] * scale, part)
            codes += (nearest + 8 * (part < 0)).tolist()
        stored.append(scales)
        packed.append([codes[k] + 16 * codes[k + 1] for k in range(0, num_inputs, 2)])
    data = torch.tensor(packed, dtype=torch.uint8)
    if form == "mxfp4":
        return {"weight_packed": data, "weight_scale": torch.tensor(stored, dtype=torch.uint8)}, values
    scale = torch.tensor(stored).to(torch.float8_e4m3fn)
    if form == "nvfp4":
        return {"weight_packed": data, "weight_scale": scale, "weight_global_scale": divides.reshape(1)}, values
    return {"weight": data, "weight_scale": scale, "weight_scale_2": multiplies}, values


def _four_bits(
    form: str, config: dict[str, Any], weight: torch.Tensor, order_seed: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    num_outputs, num_inputs = weight.shape
    group = num_inputs if "channel" in form else 32 if form.endswith("of 32") else _GROUP
    has_zeros = "zeros" in form or form in ("awq", "compressed int4 channel")
    is_awq = form.endswith("awq")
    num_groups = math.ceil(num_inputs / group)
    places = list(range(num_inputs))
    if "order" in form:
        places = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(order_seed)).tolist()
    group_of = [0] * num_inputs
    for place, column in enumerate(places):
        group_of[column] = place // group
    scale = torch.zeros(num_outputs, num_groups)
    zero = torch.full((num_outputs, num_groups), 8)
    code = torch.zeros(num_outputs, num_inputs, dtype=torch.int64)
    for g in range(num_groups):
        columns = [column for column in range(num_inputs) if group_of[column] == g]
        part = weight[:, columns]
        if has_zeros:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, g] = ((high - low) / 14).half().float()
            zero[:, g] = (-low / scale[:, g]).round().clamp(1, 15).long()
        else:
            scale[:, g] = (part.abs().amax(1) / 7).half().float()
        code[:, columns] = (part / scale[:, g : g + 1] + zero[:, g : g + 1]).round().clamp(0, 15).long()
    values = (code - zero[:, group_of]) * scale[:, group_of]
    g_idx = torch.tensor(group_of, dtype=torch.int32)
    if is_awq:
        tensors = {
            "qweight": _joined(code.t(), 1, _AWQ_ORDER),
            "qzeros": _joined(zero.t(), 1, _AWQ_ORDER),
            "scales": scale.t().half().contiguous(),
        }
    elif "gptq" in form:
        tensors = {
            "qweight": _joined(code.t(), 0),
            "qzeros": _joined(zero.t() - (0 if "v2" in form else 1), 1),
            "scales": scale.t().half().contiguous(),
            "g_idx": g_idx,
        }
    else:
        tensors = {
            "weight_packed": _joined(code, 1),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            tensors["weight_zero_point"] = _joined(zero, 0)
        if "order" in form:
            tensors["weight_g_idx"] = g_idx
    return tensors, values


def _joined(numbers: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(_CODES))) -> torch.Tensor:
    """Return eight numbers in one int32 along a dimension; the lowest bits hold number order[0] of eight."""
    listed: list[list[int]] = numbers.tolist() if dim else numbers.t().tolist()
    joined = []
    for line in listed:
        words = []
        for start in range(0, len(line), _CODES):
            eight = (line[start : start + _CODES] + [0] * _CODES)[:_CODES]
            word = 0
            for index, of in enumerate(order):
                word |= eight[of] << (_CODE_BITS * index)
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        joined.append(words)
    result = torch.tensor(joined, dtype=torch.int32)
    return result if dim else result.t().contiguous()


def quantize_checkpoint(
    form: str,
    source: Path,
    quantized: Path,
    dequantized: Path,
    linear: tuple[str, ...] = LINEAR,
    left: tuple[str, ...] = (),
) -> None:
    """Write a checkpoint with the linear layers of another, of one file, in few bits, and one with the same values.

    Queries and values have different act-orders; a gate and what it is multiplied with have one. Linear layers whose
    names match what is `left` in 16 bits are named in config.json.
    """
    small: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if kind in _EXPERTS and tensor.ndim == 3 and "fp8" in form:
            stored, plain[name] = _experts_in_one(form, tensor.float(), 1 + (kind == "gate_up_proj"))
            small |= {f"{name}{end}": part for end, part in stored.items()}
            continue
        if kind != "weight" or layer not in linear or any(re.search(rf"{each}(\.|$)", module) for each in left):
            small[name] = plain[name] = tensor
            continue
        tensors, plain[name] = quantized_layer(form, tensor.float(), order_seed=int(layer == "v_proj"))
        small |= {f"{module}.{end}": stored for end, stored in tensors.items()}
    config, of_form = json.loads((source / "config.json").read_text()), dict(CONFIGS[form])
    if left and "extra_config" in of_form:
        of_form["extra_config"] = {f".*{name}": {"bits": 16} for name in (*left, "lm_head")}
    elif left:
        name = "ignore" if "config_groups" in of_form else "modules_to_not_convert"
        of_form[name] = [*of_form.get(name, ()), *(f"re:.*{one}" if name == "ignore" else one for one in left)]
    for directory, tensors, more in (
        (quantized, small, {"quantization_config": of_form}),
        (dequantized, plain, {}),
    ):
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps({**config, **more}))


def _experts_in_one(form: str, weights: torch.Tensor, num_parts: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return experts in FP8 as one tensor, with a scale of all or of each block, and the values that they stand for."""
    is_in_blocks = "blocks" in form
    data, scales, values = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for weight in weights:
        parts = [quantized_layer(form, part) for part in weight.chunk(num_parts if is_in_blocks else 1)]
        data.append(torch.cat([stored["weight"].view(torch.uint8) for stored, _ in parts]).view(torch.float8_e4m3fn))
        found = [stored["weight_scale_inv"] for stored, _ in parts]
        scales.append(torch.cat(found) if is_in_blocks else found[0].reshape(1, 1))
        values.append(torch.cat([each for _, each in parts]))
    more = {} if is_in_blocks else {"_activation_scale": torch.ones(len(weights))}
    return {"": torch.stack(data), "_scale_inv": torch.stack(scales), **more}, torch.stack(values)


def quantize_experts(plain: Path, quantized: Path) -> None:
    """Write a checkpoint of gpt-oss with its experts in MXFP4, and round those of `plain` to the same values."""
    whole = load_file(plain / "model.safetensors")
    small = dict(whole)
    names = [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]
    for name in names:
        blocks, scales = [], []
        for expert in whole[name]:  # [K, N]: inputs before outputs
            stored, values = quantized_layer("mxfp4", expert.t())
            expert.copy_(values.t())
            blocks.append(stored["weight_packed"].unflatten(1, (-1, 16)))
            scales.append(stored["weight_scale"])
        del small[name]
        small |= {f"{name}_blocks": torch.stack(blocks), f"{name}_scales": torch.stack(scales)}
    assert names
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    quantized.mkdir()
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(small, quantized / "model.safetensors", metadata={"format": "pt"})
