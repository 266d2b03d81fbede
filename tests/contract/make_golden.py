"""Write the golden bytes of every fact: `python tests/contract/make_golden.py`. Run it only for a new type or field."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gyre.contracts import codec  # noqa: E402
from gyre.contracts.subjects import row_of  # noqa: E402
from samples import SAMPLES  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "v1.json"


def main() -> None:
    golden = {row_of(f).type: codec.encode(f, id="0" * 32, run="golden", source="test", time_ns=1, epoch=2,
                                           trace={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}).hex()
              for f in SAMPLES}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
