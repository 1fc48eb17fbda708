"""The books: what lies where, what may go, who may write. Under one lock, and never a disk.

state      all that the lock protects; its methods expect it to be held
data       level, tree, lru, leases, pins, write_queue, shared_books, graves, terms, speed, report
rules      policy, admission, eviction, covering, encodings
verbs      each takes the lock itself, and hands out what is to be done on a disk:
             a client's     matching (look-ups), lending (leases, staging), entering (a writer's)
             room           reserving, shared_room, model_budget, ageing
             copies         copies (come, go, are of no use), writing_down, found (files)
             a person's     pinning, chain_walk (removal), reading, reporting
             shared tier's  shared_work, recency
             the rest       changes (for the index), weather (what fails)
"""
