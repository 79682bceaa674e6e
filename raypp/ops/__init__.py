"""Operations on tensors that layers and steps are made of: protocols, and kernels for CPUs and NVIDIA GPUs."""
