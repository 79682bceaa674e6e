"""Makes every Python process below a machine with GPUs that are none; see `dry_cuda.py`. Found by way of PYTHONPATH."""

import os

if os.environ.get("DRY_CUDA"):
    import dry_cuda

    dry_cuda.install()
