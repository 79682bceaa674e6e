"""What is decided before a step runs: devices, layers, memory, graphs, encoders, speculation."""
