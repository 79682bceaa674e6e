"""Starts an engine again when a part of it has died. Knows neither Ray nor what an engine is made of."""
