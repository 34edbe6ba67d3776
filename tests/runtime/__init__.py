"""Fast tests of the runtime folder, one file per module."""
