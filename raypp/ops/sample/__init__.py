"""The choice of tokens from logits: changes, truncation, draws and log-probabilities."""
