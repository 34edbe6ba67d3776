"""Composition: the public runtime and whatever embeds it."""
