"""The tests; README.md in this folder says where a new one goes."""
