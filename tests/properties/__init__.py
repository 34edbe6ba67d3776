"""Hypothesis: the engine and a plain model must agree; codecs must round-trip."""
