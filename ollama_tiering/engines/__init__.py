"""What runs a model: the patched Ollama, the numpy reference engine, other programs beside them."""
