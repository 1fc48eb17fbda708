"""Generated messages of tools (scripts/gen_proto.py)."""
