"""What a client's call does: writing, looking up, leasing, reporting."""
