"""OpenAI's request and response shapes, and what they mean to the engine. Shared by the HTTP app and the batch job."""
