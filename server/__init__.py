"""HTTP: the OpenAI routes, tokenization, streaming and metrics, in front of an engine in its own process."""
