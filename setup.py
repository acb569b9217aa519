"""Builds the package with the commit of the checkout in octetrl/commit.txt, which run.json and results name.

pyproject.toml has everything else. Without git, or outside a checkout, there is no such file.
"""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithCommit(build_py):
    """The package's files, and commit.txt. An editable install reads the checkout itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or not (ROOT / ".git").exists():
            return
        try:
            describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
            said = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # no git
            return
        if said:
            (Path(self.build_lib) / "octetrl" / "commit.txt").write_text(said + "\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithCommit})
