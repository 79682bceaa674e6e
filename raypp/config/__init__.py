"""What can be set about an engine, and where it comes from."""
