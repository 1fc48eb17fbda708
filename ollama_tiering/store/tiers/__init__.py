"""Where bytes lie: what a tier must do, and the tiers there are. Knows blocks, no policy."""
