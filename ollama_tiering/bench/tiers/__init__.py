"""The store by itself, each number against what the machine gives without it, in the same run."""
