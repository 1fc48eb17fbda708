"""Generated gRPC service (scripts/gen_proto.py); its messages are in ollama_tiering.store.block.pb."""
