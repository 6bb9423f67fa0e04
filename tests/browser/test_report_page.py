"""The report's page in a real browser: it fits, can be read in light, dark and print, and asks nobody for anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import find
from playwright.sync_api import Browser, Page, sync_playwright
from report_runs import EARLIER, TIME, comparison, deploy, profile, write

from diagnostics.report import page as report_page
from diagnostics.report.runs import read_runs

pytestmark = pytest.mark.browser

WIDTHS = {"desk": (1280, 800), "phone": (390, 844), "small phone": (320, 568)}
TEXT = "h1, h2, h3, p, li, th, td, b, strong, small, span, code, pre, summary, figcaption, footer, svg text, a"

# Of each text that is seen: its colour and what is behind it, as the browser computed them.
COLOURS = """
selector => [...document.querySelectorAll(selector)].filter(e => e.innerText !== "" && e.getClientRects().length)
  .map(e => {
    let behind = e, back = "rgba(0, 0, 0, 0)";
    while (behind && back === "rgba(0, 0, 0, 0)") {
      back = getComputedStyle(behind).backgroundColor; behind = behind.parentElement;
    }
    const style = getComputedStyle(e);
    return [e.closest("svg") ? style.fill : style.color, back];
  })
"""

OVER_THE_EDGE = """
[...document.querySelectorAll("main *, header *")].filter(e => e.getBoundingClientRect().right > innerWidth)
  .map(e => e.outerHTML.slice(0, 80))
"""

# The grid's lines, and the shade of a closed gate.
FAINT = """
["--grid", "--closed"].map(name => {
  document.body.style.outlineColor = `var(${name})`; return getComputedStyle(document.body).outlineColor
})
"""

SIZES_IN_PLOTS = """
[...document.querySelectorAll("svg text")]
  .map(e => parseFloat(getComputedStyle(e).fontSize) * e.closest("svg").getScreenCTM().a)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine: `make browser` installs it where it can")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages about a host on which all went well, and about several of which one failed."""
    root = tmp_path_factory.mktemp("reports")
    write(root, "gpu-1", EARLIER, deploy(threshold=8))
    write(
        root,
        "gpu-1",
        TIME,
        deploy(cpu_engine=True, simulation={"SGLANG_CPU_ENGINE_FORWARD_MS": "20,1"}) | {"profile": profile()},
    )
    write(root, "gpu-1", "20261129T201112Z", {"compare": comparison()})
    reason = "Load-test: 3 of 50 requests lost\n" + "a-word-without-an-end" * 30 + "\nThe former deployment d8 serves."
    outcome = {"schema": "specgate.outcome/1", "host": "gpu-2", "ok": False, "reason": reason}
    write(root, "gpu-2", TIME, deploy() | {"outcome": outcome})
    write(root, "gpu-3-with-a-name-that-is-rather-long.example.org", TIME, {"run": deploy()["run"]})
    one, _ = report_page.write(read_runs(root, ["gpu-1"]), root, root / "one.html")
    all_hosts, _ = report_page.write(read_runs(root), root, root / "all.html")
    return {"one": one, "all": all_hosts}


def opened(browser: Browser, path: Path, size: tuple[int, int] = WIDTHS["desk"], scheme: str = "light") -> Page:
    """The page at *path*; whatever it asks for or complains of is in its ``seen``."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    seen: list[str] = []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: seen.append(request.url))
    page.goto(path.as_uri())
    assert seen == [path.as_uri()]
    return page


@pytest.mark.parametrize("name", ["one", "all"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_the_verdict_is_in_the_first_screen(
    browser: Browser, pages: dict[str, Path], name: str, width: str
) -> None:
    page = opened(browser, pages[name], WIDTHS[width])
    for details in page.query_selector_all("summary"):
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    # Nor does anything inside it reach over the edge.
    over = (
        "[...document.querySelectorAll('main *, header *')].filter(e => e.getBoundingClientRect().right > innerWidth)"
    )
    assert page.evaluate(f"{over}.map(e => e.outerHTML.slice(0, 80))") == []
    verdict = page.query_selector(".verdict strong")
    assert verdict is not None
    box = verdict.bounding_box()
    assert box is not None
    page.evaluate("scrollTo(0, 0)")
    box = verdict.bounding_box()
    assert box is not None
    assert 0 < box["y"] < box["y"] + box["height"] < WIDTHS[width][1]
    expected = {"one": "✓ gpu-1: deployed, proved and tested", "all": "✗ 1 of 3 hosts are deployed, proved and tested"}
    assert verdict.inner_text().startswith(expected[name])


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", ["one", "all"])
@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_is_legible(browser: Browser, pages: dict[str, Path], name: str, scheme: str) -> None:
    """Contrast of at least 4.5 for every text (WCAG 2, level AA), and of 3 for the lines of the plots."""
    page = opened(browser, pages[name], scheme=scheme)
    if scheme == "print":
        page.emulate_media(media="print", color_scheme="dark")
    found: list[tuple[str, str]] = [tuple(pair) for pair in page.evaluate(COLOURS, TEXT)]
    assert len(found) > 100
    assert {pair: contrast(*pair) for pair in set(found) if contrast(*pair) < 4.5} == {}
    backs = {back for _, back in found}
    assert ("rgb(255, 255, 255)" in backs) == (scheme != "dark")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lines = set(page.evaluate("[...document.querySelectorAll('svg path')].map(e => getComputedStyle(e).stroke)"))
    drawn = {stroke for stroke in lines if stroke.startswith("rgb") and stroke not in page.evaluate(FAINT)}
    assert len(drawn) >= 4
    assert {stroke: contrast(stroke, back) for stroke in drawn if contrast(stroke, back) < 3} == {}


def test_plots_keep_the_size_of_their_text_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"], WIDTHS["phone"])
    sizes: list[float] = page.evaluate(SIZES_IN_PLOTS)
    assert len(sizes) > 50
    assert min(sizes) >= 9


def test_on_paper_nothing_is_folded_away(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    page = opened(browser, pages["one"], scheme="dark")
    page.emulate_media(media="print")
    folded: list[Any] = page.evaluate(
        "[...document.querySelectorAll('details td')].filter(e => e.getBoundingClientRect().height === 0)"
        ".map(e => e.innerText)"
    )
    assert folded == []
    path = tmp_path / "report.pdf"
    page.pdf(path=path, prefer_css_page_size=True)
    pdf = path.read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) <= 12
