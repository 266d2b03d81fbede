"""What these tests compare with is installed apart, by its own make target; without it they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_trl_*.py"]
