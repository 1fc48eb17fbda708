"""What a tree of links must do before it is kept: name the devices that the installed llama-server
names, and answer after a kill, from the store, with the bits of the installed one's own cache in
memory.
"""

from ollama_tiering.launch.self_test.run import self_test as self_test
