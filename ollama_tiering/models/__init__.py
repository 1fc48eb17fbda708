"""Makes small GGUF models with seeded random weights: real architectures, no download."""
