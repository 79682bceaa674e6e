"""Speculative decoding on the last stage: how drafts are proposed, and which of them the model accepts."""
