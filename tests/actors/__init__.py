"""Fast tests of the actors folder, one file per module."""
