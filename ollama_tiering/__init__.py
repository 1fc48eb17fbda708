"""KV cache for stock Ollama that outlives restarts."""

__version__ = "0.1.0"
