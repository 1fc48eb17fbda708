"""The books: what lies where, what may go, who may write. Under one lock; never a disk."""
