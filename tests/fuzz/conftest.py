"""Makes the helpers beside these tests importable (the tests have no packages)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
