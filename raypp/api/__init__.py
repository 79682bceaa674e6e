"""The Python doors: `LLM` for scripts and notebooks, `AsyncLLM` for servers."""
