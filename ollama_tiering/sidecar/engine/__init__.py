"""The engine socket: what the gRPC service offers, in a form that C++ speaks in a hundred lines."""
