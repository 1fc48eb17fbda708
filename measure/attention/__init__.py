"""Attention by itself: ours, ggml's from the cached Ollama source, and what the machine can do."""
