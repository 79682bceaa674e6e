"""Operations of NVIDIA GPUs: Triton kernels, FlashInfer and cuBLAS."""
