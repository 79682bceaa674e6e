"""Speculative decoding on the last stage: who proposes drafts, and which of them the model accepts."""
