"""What writing a message costs: the Writer beside its limits and its alternatives, in one
interleaved run.
"""
