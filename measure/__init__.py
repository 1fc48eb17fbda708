"""What maintainers measure; not in the wheel. Programs are run as `python -m measure.store`, and
scripts/measure.py lists what each record comes from.
"""
