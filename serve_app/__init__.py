"""The HTTP server: an OpenAI-compatible Ray Serve application around one engine per replica."""
