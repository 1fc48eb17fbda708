"""Attention by itself: ours, ggml's of the cached Ollama source, and what the machine gives."""
