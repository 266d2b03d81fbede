"""The clinic's files are scripts beside each other, so their directory goes on the path."""

import sys
from pathlib import Path

CLINIC = Path(__file__).resolve().parents[3] / "examples" / "clinic"
sys.path.insert(0, str(CLINIC))
