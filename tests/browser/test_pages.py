"""Pages as a browser shows them: drawn, legible, within the window, and without a network.

Chromium is driven by playwright, which ``nox -s browser`` installs; the browser is the system's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.made import PAGES

# A plan of 1,000 parameters takes minutes on a busy machine.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
_LEAST_CONTRAST = 4.5  # WCAG 2, level AA: https://www.w3.org/TR/WCAG22/#contrast-minimum
_MOST_ELEMENTS = 60_000  # a page of more is slow to scroll
_WIDTHS = (360, 1400)

# Each text with the colour behind it, by computed styles: transparent backgrounds let see through
# to an ancestor's, and the text of figures is SVG, whose colour is its fill.
_CONTRASTS = """() => {
  const parsed = colour => (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parsed(getComputedStyle(each).backgroundColor);
      if ((colour[3] ?? 1) > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const each of document.querySelectorAll("h1, h2, pre, th, td, input, svg text")) {
    const shown = each.getBoundingClientRect();
    if (!shown.width || !(each.textContent.trim() || each.placeholder)) continue;
    const style = getComputedStyle(each, each.placeholder ? "::placeholder" : null);
    const colour = parsed(each instanceof SVGElement ? style.fill : style.color);
    const [low, high] = [luminance(colour), luminance(behind(each))].sort((a, b) => a - b);
    const key = `${each.tagName} ${each.getAttribute("class") ?? ""}`;
    const contrast = (high + 0.05) / (low + 0.05);
    if (!(found[key]?.contrast <= contrast))
      found[key] = {contrast, text: (each.textContent || each.placeholder).slice(0, 40)};
  }
  return found;
}"""

# Of each figure: how many shapes plotly drew of its data, and texts that overlap others or stick
# out. A text at an angle has a larger box than it needs, so it may overlap its neighbours'.
_FIGURES = """() => [...document.querySelectorAll(".figure")].map(figure => {
  const box = figure.getBoundingClientRect();
  const texts = [...figure.querySelectorAll(
      ".legendtext, .g-xtitle text, .g-ytitle text, .xtick text, .ytick text")]
    .filter(each => /rotate\\((?!-?(0|90)[,)])/.exec(each.getAttribute("transform")) === null)
    .map(each => ({text: each.textContent, at: each.getBoundingClientRect()}))
    .filter(each => each.at.width && each.at.height);
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  return {
    id: figure.id,
    drawn: figure.querySelectorAll(".mlayer path, .mlayer image").length,
    overlapping: texts.flatMap((a, place) => texts.slice(place + 1)
      .filter(b => meet(a.at, b.at)).map(b => `${a.text} / ${b.text}`)),
    outside: texts.filter(each => each.at.left < box.left - 1 || each.at.right > box.right + 1
      || each.at.bottom > box.bottom + 1).map(each => each.text),
  };
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, or a skip that tells where it is from."""
    playwright = pytest.importorskip("playwright.sync_api", reason="run `nox -s browser`")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(
            f"no Chromium: none of {', '.join(_NAMES)} is on the path, so no page was looked at; "
            "apt-get install chromium"
        )
    with playwright.sync_playwright() as driver:
        # A container's root may not start Chromium's sandbox; the pages are our own.
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=PAGES)
def page_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of each kind, written once."""
    path = tmp_path_factory.mktemp("pages") / f"{request.param}.html"
    PAGES[request.param](path)
    return path


@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_drawn_and_legible(
    browser: Any, page_file: Path, scheme: str, width: int, tmp_path: Path
) -> None:
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True
    )
    page = context.new_page()
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    picture = tmp_path / f"{page_file.stem}-{scheme}-{width}.png"  # for a person to look at
    page.screenshot(path=picture, full_page=True, timeout=0)
    contrasts = page.evaluate(_CONTRASTS)
    figures = page.evaluate(_FIGURES)
    inner, scrolled, count = page.evaluate(
        "[innerWidth, document.documentElement.scrollWidth, document.querySelectorAll('*').length]"
    )
    context.close()
    assert said == []
    assert requests == [page_file.as_uri()]
    assert inner == width
    assert scrolled <= width
    assert count < _MOST_ELEMENTS
    assert figures
    for each in figures:
        assert each["drawn"] > 0, each
        assert each["overlapping"] == [], each
        assert each["outside"] == [], each
    assert {"H1 ", "H2 "} <= contrasts.keys()
    assert any(key.startswith("text ") for key in contrasts), "no text of a figure was looked at"
    unclear = {k: v for k, v in contrasts.items() if v["contrast"] < _LEAST_CONTRAST}
    assert unclear == {}


def test_colours_follow_when_the_reader_changes_from_light_to_dark(
    browser: Any, tmp_path: Path
) -> None:
    PAGES["verify"](tmp_path / "page.html")
    page = browser.new_page(color_scheme="light")
    page.goto((tmp_path / "page.html").as_uri())
    fill = "getComputedStyle(document.querySelector('svg .ytick text')).fill"
    light = page.evaluate(fill)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{fill} !== '{light}'")
    unclear = [v for v in page.evaluate(_CONTRASTS).values() if v["contrast"] < _LEAST_CONTRAST]
    page.close()
    assert unclear == []


def test_a_filter_hides_the_rows_without_its_text(browser: Any, tmp_path: Path) -> None:
    PAGES["verify"](tmp_path / "page.html")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_label("filter rows").fill("BLOCK.7.")
    shown = (
        page.locator("tbody tr:visible td:first-child").filter(has_text="block.").all_inner_texts()
    )
    page.close()
    assert shown == [f"block.7.layer.{layer}.weight" for layer in range(10)]
