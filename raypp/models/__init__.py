"""Models: configurations, layers, weights, draft heads and vision towers."""
