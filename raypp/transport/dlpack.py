"""Tensors over memory at a given address, through DLPack (version 0.8, the unversioned capsule).

torch's other way, `__cuda_array_interface__`, asks the driver which device an address belongs to. For memory of a
neighbour's GPU the answer would be that GPU, while the tensor must belong to the GPU that writes into it.
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2  # DLDeviceType
_UNSIGNED_INTEGER = 1  # DLDataTypeCode


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at an address as a tensor, uint8 [num_bytes], that does not own them.

    Args:
        address: Where they are.
        num_bytes: How many.
        device: The tensor's device; it must be able to reach them.
    """
    shape = (ctypes.c_int64 * 1)(num_bytes)
    managed = _ManagedTensor(
        _Tensor(
            data=address,
            device=_Device(_CUDA, device.index) if device.type == "cuda" else _Device(_CPU, 0),
            ndim=1,
            dtype=_DataType(_UNSIGNED_INTEGER, 8, 1),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        )
    )
    # torch reads the description when the last view of the tensor goes, perhaps at the very end of the process. So the
    # few dozen of them are never freed.
    for kept in (shape, managed):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: torch.Tensor = from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
    return tensor
