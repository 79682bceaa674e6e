"""Pictures at the door: read, checked, brought to patches, and given their places in a prompt."""
