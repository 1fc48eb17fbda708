"""The block store as a gRPC service on a Unix socket. Policy is in ollama_tiering.store."""
