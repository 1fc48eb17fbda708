"""Why prompts were computed again: what a person is told of a parting. Text is made of tokens here,
by the model's own vocabulary, shown, and never kept.
"""
