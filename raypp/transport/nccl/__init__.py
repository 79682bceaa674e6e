"""Links by NCCL, between GPUs of any nodes: `nccl`."""
