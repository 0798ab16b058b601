"""The page in headless Chromium (scripts/packages.test), and without a browser."""

import re

import pytest

import kept_experiments
from vtorque_experiment import compare, page
from vtorque_experiment.results import read
from vtorque_report import drawing

LOOKS = [(1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")]
TWO = 'title = "Two"\nscript = "job.sh"\nmatrix.bare = [true, false]\n'
# Each plot: its box, the bounding box of its texts, boxes and colors of its points and strokes.
MEASURE = """
[...document.querySelectorAll('.plot svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect());
  const of = mark => [...svg.querySelectorAll(mark)].map(m => {
    const b = m.getBoundingClientRect();
    return [b.left - box.left, box.right - b.right, getComputedStyle(m).fill];
  });
  return {
    width: box.width, height: box.height,
    left: Math.min(...texts.map(t => t.left)) - box.left,
    right: box.right - Math.max(...texts.map(t => t.right)),
    points: of('.mark-symbol path[aria-roledescription="point"]'),
    strokes: of('.mark-rect path[aria-roledescription="tick"]'),
  };
})
"""
COLOURS = """
[...'ab'].map((_, n) => getComputedStyle(document.body)[n ? 'color' : 'backgroundColor'])
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the pages of 2 and of 192 points, and of a comparison."""
    top = tmp_path_factory.mktemp("pages")
    two = kept_experiments.make(
        top / "two", TWO, lambda cell, repetition: {"wall": 1e9 + 1e8 * cell["bare"]}
    )
    many = kept_experiments.sweep(top / "many", 32)
    found = {"two": page.results_page(read(two)), "many": page.results_page(read(many))}
    pairs = compare.compare_within(read(many), ["bare=true"])
    found["pairs"] = page.comparison_page("Guests", ["192 points"], pairs, ("baseline", "this"))
    for name, text in found.items():
        (top / f"{name}.html").write_text(text)
    return lambda name: top / f"{name}.html"


def shown(browser, path, points, strokes):
    assert browser.complaints == []
    assert browser.requests == [f"file://{path}"]
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    found = browser.value(MEASURE)
    assert [len(plot["points"]) for plot in found] == points
    assert [len(plot["strokes"]) for plot in found] == strokes
    for plot in found:
        assert plot["width"] > 250 and plot["height"] > 60
        assert plot["left"] >= -1 and plot["right"] >= -1, plot
        for left, right, fill in plot["points"] + plot["strokes"]:
            assert left >= 0 and right >= 0 and fill.startswith("rgb")
    return found


@pytest.mark.e2e
@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "look"),
    [
        pytest.param(name, look, marks=() if n == at else pytest.mark.full)
        for at, name in enumerate(("two", "many", "pairs"))
        for n, look in enumerate(LOOKS)
    ],
)
def test_page_opens_without_errors_and_shows_its_plots(browser, pages, name, look):
    path = pages(name)
    browser.open(path, width=look[0], dark=look[1] == "dark")
    expected = {
        "two": ([2, 2] * 2, [2, 0] * 2),
        "many": ([192, 192] * 3, [6, 0] * 3),
        "pairs": ([256] * 3, [8] * 3),
    }
    shown(browser, path, *expected[name])
    back, text = (sum(map(int, re.findall(r"\d+", c)[:3])) / 765 for c in browser.value(COLOURS))
    assert (back < 0.2 and text > 0.8) if look[1] == "dark" else (back > 0.9 and text < 0.3)


@pytest.mark.e2e
@pytest.mark.integration
def test_hostile_labels_are_escaped_and_images_have_accessible_names(browser, tmp_path):
    bad = """</title></style></svg>\\"'><script>window.hacked=1</script><img src=x onerror=y>"""
    text = f'title = "{bad}"\nscript = "job.sh"\nmatrix.env.A = ["{bad}", "[datum]+alert(1)"]\n'
    top = kept_experiments.make(tmp_path, text, lambda cell, repetition: {"wall": 1.0}, failed=(1,))
    path = tmp_path / "page.html"
    path.write_text(page.results_page(read(top)))
    browser.open(path)
    assert browser.complaints == [] and browser.requests == [f"file://{path}"]
    assert browser.value("typeof window.hacked") == "undefined"
    assert browser.value("document.querySelectorAll('script, img').length") == 0
    told = browser.accessible()
    images = [name for role, name in told if role == "image"]
    assert images and all(re.search(r"\d", name) for name in images)
    assert [name for role, name in told if role == "table"]


def test_page_without_a_drawing_library_has_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "can_draw", lambda: False)
    top = kept_experiments.sweep(tmp_path, 2, failed=(5,))
    found = page.results_page(read(top))
    assert "vl-convert-python is not installed" in found and "<svg" not in found
    assert found.count("guest vcpus=2 SIZE=2") >= 3
    assert "exit code 1: &lt;broken&gt;" in found and "too few to compare" in found
    assert "submitted on n1 (A CPU, 6.1), double" in found
