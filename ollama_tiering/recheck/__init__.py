"""Stored conversations are computed again by an engine of their own, and every bit is compared."""
