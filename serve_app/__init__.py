"""The HTTP door: an OpenAI-compatible Ray Serve application around one engine per replica."""
