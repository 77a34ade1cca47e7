"""HTTP: OpenAI's API and the endpoints of llama.cpp that its users rely on, over one engine."""
