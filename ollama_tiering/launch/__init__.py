"""Starts, watches and stops the two processes: the sidecar, and the patched server beside it."""
