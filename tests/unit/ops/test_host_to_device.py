"""What is joined on the host before it goes to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raypp.ops.host_to_device import concatenated

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32])
def test_arrays_are_joined_along_their_first_dimension(dtype):
    parts = [np.arange(count * 3, dtype=dtype).reshape(count, 3) for count in (2, 0, 5)]
    parts[0].flags.writeable = False  # as what comes out of a message is
    joined = concatenated(parts, CPU)
    assert joined.numpy().dtype == dtype
    assert np.array_equal(joined.numpy(), np.concatenate(parts))


def test_what_was_joined_may_change():
    part = np.zeros(4, np.int64)
    joined = concatenated([part], CPU)
    part[:] = 1
    assert not joined.any()
