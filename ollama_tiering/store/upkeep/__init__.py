"""What the store does by itself, or several of its parts do: room, moving, damage, the index."""
