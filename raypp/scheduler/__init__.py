"""The scheduler: which requests and tokens every step computes, and which KV blocks they get."""
