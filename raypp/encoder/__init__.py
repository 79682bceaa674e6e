"""Encoders: what turns pictures into embeddings."""
