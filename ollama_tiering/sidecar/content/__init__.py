"""What is in the files that engines have loaded: digests that were computed, not names."""
