"""What a block is: its key, its file, its encodings. Pure: bytes in, bytes out."""
