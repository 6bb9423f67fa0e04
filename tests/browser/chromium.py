"""Finds a Chromium for the tests: the system's, else Playwright's own. As a program: prints it, or ends with 1."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def find() -> str | None:
    """Path of a Chromium that starts, or None."""
    for name in NAMES:
        path = shutil.which(name)
        # Ubuntu's chromium-browser is there and only says that it is a snap.
        if path and subprocess.run([path, "--version"], capture_output=True, check=False, timeout=60).returncode == 0:
            return path
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).is_file() else None


if __name__ == "__main__":
    found = find()
    print(found or "no Chromium found")
    sys.exit(0 if found else 1)
