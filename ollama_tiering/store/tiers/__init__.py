"""The tiers, in which bytes lie: the contract of a tier, and every tier. This package knows blocks,
but no policy.
"""
