"""Store what torch, transformers and peft compute in tests/expected/: needs the extra `parity`.

python tests/harness/regenerate_expected.py
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
USES = re.compile(r"^import .*(recorded|hf_reference|reward_models)", re.MULTILINE)

if __name__ == "__main__":
    shutil.rmtree(TESTS / "expected", ignore_errors=True)
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if USES.search(file.read_text())]
    command = [sys.executable, "-m", "pytest", "--store-expected", "-m", "not exhaustive", *files]
    sys.exit(subprocess.run(command, cwd=TESTS.parent).returncode)
