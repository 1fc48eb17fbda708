"""What a person asks of a store: lists, removals, checks, archives; also without a sidecar."""
