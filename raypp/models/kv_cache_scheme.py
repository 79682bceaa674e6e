"""Whether a checkpoint was made for a KV cache in 8 bits, by the `kv_cache_scheme` of its config.json. Needs no torch.

compressed-tensors writes it, below `quantization_config`; the scales are tensors, see `raypp.models.kv_scales`.
"""

from __future__ import annotations

from raypp.models.config_fields import ConfigFields

_NAME = "quantization_config.kv_cache_scheme"
_KNOWN = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_WHERE_UNSAID = {"strategy": "tensor", "dynamic": False, "symmetric": True}


def has_fp8_kv_cache(fields: ConfigFields) -> bool:
    """Return whether config.json says so.

    Raises:
        ModelLoadError: it has a scheme of another kind.
    """
    quantization = fields.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if scheme is None:
        return False
    if not isinstance(scheme, dict):
        raise fields.error(_NAME, repr(scheme), "an object")
    said = {**_WHERE_UNSAID, **{name: value for name, value in scheme.items() if value is not None}}
    others = {name: said.get(name) for name, value in _KNOWN.items() if said.get(name) != value}
    if others:
        known = ", ".join(f"{name}={value}" for name, value in _KNOWN.items())
        raise fields.error(
            _NAME,
            ", ".join(f"{name}={value}" for name, value in others.items()),
            f"{known}: one scale per layer, measured before, for numbers in float8_e4m3fn",
        )
    return True
