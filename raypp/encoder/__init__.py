"""Encoders: what turns images into embeddings."""
