"""Makes the pictures of docs/report.md: python docs/screenshots.py PAGE [NAME ...]

PAGE is a page that `fab report` wrote; NAME one of verdict, load, arms, break-even, phone, or all of them.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests/browser"))
from chromium import find  # noqa: E402  (a module of the tests, found above)


def save(picture: bytes, name: str) -> None:
    """Write a picture of the page with as many colours as it needs, which makes it small."""
    path = DOCS / f"report-{name}.png"
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(200).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def section(page: Page, heading: str) -> bytes:
    """The page from *heading* on, as much as fits on a screen."""
    page.get_by_role("heading", name=heading).first.evaluate("element => element.scrollIntoView()")
    return page.screenshot()


def main(path: Path, names: list[str]) -> None:
    """Open the page as a desk and as a phone see it, and save what they show."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find())
        desk = browser.new_page(viewport={"width": 1000, "height": 760})
        phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        for page in (desk, phone):
            page.goto(path.resolve().as_uri())
        takes = {
            "verdict": desk.screenshot,
            "load": lambda: section(desk, "Load test"),
            "arms": lambda: section(desk, "Arms compared"),
            "break-even": lambda: section(desk, "Where speculation pays"),
            "phone": phone.screenshot,
        }
        for name in names or takes:
            save(takes[name](), name)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
