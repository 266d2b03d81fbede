"""The examples' files are scripts beside each other, so their directories go on the path."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path[:0] = [str(EXAMPLES / "clinic"), str(EXAMPLES / "clinic-agents")]
