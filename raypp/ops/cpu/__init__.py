"""Operations in plain torch: those of CPUs, and what kernels for GPUs are tested against."""
