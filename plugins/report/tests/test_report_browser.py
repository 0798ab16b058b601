"""The page in headless Chromium (scripts/packages.test): requests, messages and appearance."""

import re

import pytest

import kept_data
from vtorque_report import load, page

pytestmark = [pytest.mark.integration, pytest.mark.e2e]
JOBS = {
    "one guest": {"seconds": 3600.0, "guests": 1},
    "eight guests": {"seconds": 3600.0, "guests": 8},
    "three seconds": {"seconds": 3.0, "guests": 1},
    "three days": {"seconds": 3 * 86400.0, "guests": 2},
}
PLOTS = 6  # of a guest
LOOKS = [(1280, "light"), (390, "dark"), (390, "light"), (1280, "dark")]
# Quick runs draw two short jobs in two layouts. Other jobs, some of which take seconds, are "full".
SHORT = {"one guest": LOOKS[0], "three seconds": LOOKS[1]}
SHOWN = [
    pytest.param(name, *look, marks=() if SHORT.get(name) == look else pytest.mark.full)
    for name in JOBS
    for look in LOOKS
]

# Each plot: its box, the bounding box of its texts, the ends of its lines, its number of points.
MEASURE = """
[...document.querySelectorAll('.plot svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect());
  const marks = [...svg.querySelectorAll('.mark-line path, .mark-rect.role-mark path')];
  return {
    width: box.width, height: box.height,
    left: Math.min(...texts.map(t => t.left)) - box.left,
    right: box.right - Math.max(...texts.map(t => t.right)),
    texts: texts.length,
    marks: marks.map(m => [m.getAttribute('d').split(/[LMhv]/).length - 1,
                           m.getBoundingClientRect().width, getComputedStyle(m).stroke]),
  };
})
"""
LUMINANCE = """
[...'ab'].map((_, n) => getComputedStyle(document.body)[n ? 'color' : 'backgroundColor'])
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    found = {}

    def get(name):
        if name not in found:
            top = tmp_path_factory.mktemp("page")
            directory = kept_data.make(top / "kept", **JOBS[name])
            found[name] = top / "page.html"
            found[name].write_text(page.render(load.report([directory], 0.0)))
        return found[name]

    return get


@pytest.mark.parametrize(("name", "width", "scheme"), SHOWN)
def test_page_opens_without_errors_and_shows_its_plots(
    browser, pages, tmp_path, name, width, scheme
):
    path = pages(name)
    browser.open(path, width=width, dark=scheme == "dark")
    assert browser.complaints == []
    assert browser.requests == [f"file://{path}"]
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    found = browser.value(MEASURE)
    assert len(found) == PLOTS * JOBS[name]["guests"] + 1
    for plot in found:
        assert plot["width"] > 250 and plot["height"] > 90
        assert plot["texts"] > 4 and plot["left"] >= -1 and plot["right"] >= -1, plot
        assert plot["marks"]
    timeline, *lines = found
    assert len(timeline["marks"]) == 9 + JOBS[name]["guests"]
    assert max(width for _, width, _ in timeline["marks"]) > timeline["width"] / 4
    points = {count for plot in lines for count, _, _ in plot["marks"]}
    assert max(points) <= 242
    assert min(points) >= (3 if JOBS[name]["seconds"] < 60 else 200)
    assert all(stroke.startswith("rgb") for p in found for _, _, stroke in p["marks"])
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_dark_page_is_dark_and_readable(browser, pages):
    for dark in (False, True):
        browser.open(pages("one guest"), dark=dark)
        back, text = (
            sum(map(int, re.findall(r"\d+", c)[:3])) / 765 for c in browser.value(LUMINANCE)
        )
        assert (back < 0.2 and text > 0.8) if dark else (back > 0.9 and text < 0.3)


@pytest.mark.parametrize(
    "name", ["one guest", pytest.param("eight guests", marks=pytest.mark.full)]
)
def test_images_and_tables_have_accessible_names(browser, pages, name):
    browser.open(pages(name), width=390)
    told = browser.accessible()
    images = [name for role, name in told if role == "image"]
    assert len(images) == JOBS[name]["guests"] * PLOTS + 1
    assert all(re.search(r"\d", name) and len(name) > 30 for name in images)
    headings = [name for role, name in told if role == "heading"]
    assert headings[0] == "Job 42.srv (crystal)" and "Use" in headings and "Hints" in headings
    assert sum(name.startswith("Guest ") for name in headings) == JOBS[name]["guests"]
    assert [name for role, name in told if role == "main"]
    browser.value("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    told = browser.accessible()
    tables = [name for role, name in told if role == "table"]
    guests = JOBS[name]["guests"]
    assert len(tables) == guests * PLOTS + (1 if guests == 1 else 2)
    assert f"CPU of guest {min(3, guests - 1)}, CPUs in use" in tables
    assert sum(role == "columnheader" for role, _ in told) > len(tables)


@pytest.mark.full
def test_hostile_names_are_inactive_in_a_browser(browser, tmp_path):
    bad = (
        """</title></style></svg>"'><script>window.hacked=1</script><img src=x onerror=hacked=1>"""
    )

    def change(values):
        return values | {f'vtorque_app_{bad}{{a="{bad}"}}': 1.0}

    names = ("job", "name", "owner", "node", "batch", "image")
    kept_data.make(tmp_path / "k", seconds=10.0, change=change, **dict.fromkeys(names, bad))
    path = tmp_path / "page.html"
    path.write_text(page.render(load.report([tmp_path / "k"], 0.0)))
    browser.open(path)
    assert browser.complaints == [] and browser.requests == [f"file://{path}"]
    assert browser.value("typeof window.hacked") == "undefined"
    assert browser.value("document.querySelectorAll('script, img').length") == 0
    assert browser.value("document.querySelectorAll('.plot svg').length") == PLOTS + 2


@pytest.mark.full
def test_content_policy_blocks_injected_markup(browser, tmp_path, pages):
    """If markup passed the escaping, it could neither run nor send requests."""
    text = pages("three seconds").read_text()
    path = tmp_path / "page.html"
    evil = "<script>window.hacked=1</script><img src='http://192.0.2.1/x'><p onclick='x()'>"
    path.write_text(text.replace("<main>", f"<main>{evil}"))
    browser.open(path)
    assert browser.value("typeof window.hacked") == "undefined"
    assert len(browser.complaints) >= 2
    assert not [e for e in browser.seen("Network.responseReceived") if "192.0.2.1" in str(e)]
