"""Starts, watches and stops the two processes; on that stand up, demo and doctor."""
