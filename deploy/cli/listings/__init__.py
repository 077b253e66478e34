"""The listings of `sidecar` as tables for people; details are in `show` and in `-o json`."""
