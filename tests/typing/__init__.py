"""Checked by mypy and basedpyright, never run."""
