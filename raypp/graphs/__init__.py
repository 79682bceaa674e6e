"""CUDA graphs: sizes to capture for, capturing, replaying. Takes callables; knows no model."""
