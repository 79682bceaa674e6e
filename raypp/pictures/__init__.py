"""Images of requests: read, checked, brought to patches, and given their places in a prompt."""
