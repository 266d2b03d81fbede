"""Data of tests is not tests: tasks bring tests of their own, for the workspaces they belong to."""

collect_ignore_glob = ["*"]
