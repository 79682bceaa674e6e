"""The Python API: `LLM` for scripts and notebooks, `AsyncLLM` for servers."""
