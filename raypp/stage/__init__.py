"""One pipeline stage: its rows, the layers and the end of its steps, and their CUDA graphs."""
