"""Power loss, failing disks and killed processes, each followed by a reopening."""
