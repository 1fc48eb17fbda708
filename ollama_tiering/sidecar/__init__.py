"""Transport of the block store: gRPC on a Unix socket. Policy is in ollama_tiering.store."""
