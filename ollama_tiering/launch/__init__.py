"""Starts, watches and stops two processes: the sidecar, and the patched server beside it."""
