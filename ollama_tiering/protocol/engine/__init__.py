"""The engine socket's protocol, for both ends: frames and messages (docs/engine-protocol.md)."""
