"""`python -m ollama_tiering` is the `tiering` command."""

from ollama_tiering.cli import main

if __name__ == "__main__":
    main()
