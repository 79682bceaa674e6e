"""What every test relies on: one compute thread, no network, limits, repeatable hypothesis runs, markers by folder.

Where there is no GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

# Before anything imports torch, tokenizers or ray, which read these once. Processes that tests start inherit them.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default, 15, gives actors little beside the other workers of pytest
}.items():
    os.environ.setdefault(_name, _value)
if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in Triton's interpreter; read when it is imported

from hypothesis import HealthCheck, Phase, settings  # noqa: E402

# Deadlines per example would measure the machine. On CI no example is random; but Hypothesis takes constants from
# modules of this repository that are loaded, so examples change with the code and with the tests that ran before.
# They are not made smaller there: with a server that no longer answers, that takes longer than a test may.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
_CI_PHASES = (Phase.explicit, Phase.generate)
settings.register_profile(
    "ci", parent=settings.get_profile("local"), derandomize=True, database=None, phases=_CI_PHASES
)
settings.load_profile("ci" if os.environ.get("CI") else "local")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would all that it starts: tests send it to users' programs.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["pytest_limits"]

_TESTS = Path(__file__).parent
_MARKER_OF_FOLDER = {_TESTS / folder: folder for folder in ("ray", "parity", "gpu")}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector from what imports leave behind, meanwhile and later: each worker imports all test files."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the folder they are in; skip what needs a GPU where there is none; leave full sizes to soak.

    Those with Ray come first: one process runs them all (tools/pytest_limits.py), which takes longest.
    """
    for item in items:
        if (marker := _MARKER_OF_FOLDER.get(item.path.parent)) is not None:
            item.add_marker(marker)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    has_gpu = bool(on_gpu) and _has_gpu()
    if not has_gpu:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    _check_named_variants(items)
    if os.environ.get("TEST_SIZES") != "all" and not has_gpu:
        items[:] = [item for item in items if not _is_for_soak(item)]
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


def _check_named_variants(items: list[pytest.Item]) -> None:
    """Refuse names in `in_ci` that none of a function's variants has, if all are here."""
    if not items or any("::" in argument for argument in items[0].config.args):
        return
    variants = dict[tuple[str, ...], set[str]]()
    for item in items:
        if (named := item.get_closest_marker("in_ci")) is not None:
            variants.setdefault((item.nodeid.split("[")[0], *named.args), set()).add(_variant(item))
    for (function, *named), found in variants.items():
        if unknown := set(named) - found:
            raise pytest.UsageError(f"{function}: in_ci names {sorted(unknown)}; its variants are {sorted(found)}")


def _is_for_soak(item: pytest.Item) -> bool:
    """Return whether a test is marked as full, or is a variant that its function's `in_ci` does not name."""
    named = item.get_closest_marker("in_ci")
    return item.get_closest_marker("full") is not None or (named is not None and _variant(item) not in named.args)


def _variant(item: pytest.Item) -> str:
    """Return the name of a variant; of a test without parameters none, which `in_ci` does not name."""
    return item.callspec.id if hasattr(item, "callspec") else ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
