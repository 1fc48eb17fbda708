"""The engine socket's protocol (docs/engine-protocol.md): frames and messages, for both ends. Pure."""
