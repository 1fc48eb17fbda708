"""The checks of this machine that `tiering doctor` makes."""
