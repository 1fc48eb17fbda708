"""Generated messages (scripts/gen_proto.py); no gRPC here, so the store may import them."""
