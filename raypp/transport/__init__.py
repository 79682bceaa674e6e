"""Links that carry tensors between stages."""
