"""The HTTP server: an event loop that speaks OpenAI's API, and the model in a process of its own."""
