"""Fast tests of the storage folder, one file per module."""
