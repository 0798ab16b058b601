"""The page: no script, no external resources, escaped text. Without a browser."""

import base64
import hashlib
import itertools
import json
import re
import sys
from html.parser import HTMLParser

import pytest

import kept_data
from vtorque_report import load, page, plots

HOSTILE = """</script></style></title>"'><script>hack()</script><img src=x onerror=hack()>"""
VOID = {"meta", "link", "meter", "br", "img"}


class PageContent(HTMLParser):
    """All elements, attributes and texts of a page; its nesting is checked."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.words, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID - {"meter"}:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def rendered(directory):
    text = page.render(load.report([directory], kept_data.START + 100))
    return text, PageContent(text)


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory):
    return rendered(kept_data.make(tmp_path_factory.mktemp("job"), seconds=600.0, guests=2))


def test_each_guest_has_plots_and_each_plot_a_description(whole_page):
    _, seen = whole_page
    titles = [
        "CPU",
        "Steal",
        "Memory",
        "Disk, without shared directories",
        "Network",
        'loss{fold="2",phase="train"}',
    ]
    labels = [value for _, name, value in seen.attributes if name == "aria-label"]
    for guest in (0, 1):
        for title in titles:
            (label,) = [each for each in labels if each.startswith(f"{title} of guest {guest}, ")
                        and "average" in each]  # fmt: skip
            assert "at most" in label and "10 min" in label
    assert seen.elements.count("svg") == 2 * len(titles) + 1
    assert seen.elements.count("details") == 2 * len(titles) + 1
    assert seen.elements.count("table") == 2 * len(titles) + 2


def test_page_has_no_script_and_loads_nothing(whole_page):
    text, seen = whole_page
    assert not {"script", "iframe", "object", "embed", "base", "form", "img", "image", "use"} & {
        *seen.elements
    }
    assert not [name for _, name, _ in seen.attributes if name.startswith("on") or name == "style"]
    links = [(t, n, v) for t, n, v in seen.attributes if n in ("href", "src", "xlink:href", "data")]
    assert links == [("link", "href", "data:,")]
    assert "url(" not in text and "@import" not in text
    addresses = {*re.findall(r"https?://[^\s\"'<]+", text)}
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_content_policy_allows_only_the_style(whole_page):
    text, seen = whole_page
    (policy,) = [v for _, n, v in seen.attributes if n == "content" and "default-src" in v]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "script" not in policy and "connect" not in policy and "unsafe" not in policy


def test_headings_are_ordered_and_the_language_is_set(whole_page):
    _, seen = whole_page
    levels = [int(tag[1]) for tag in seen.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert ("html", "lang", "en") in seen.attributes
    identities = [value for _, name, value in seen.attributes if name == "id"]
    assert len(identities) == len({*identities})


def test_user_text_is_escaped(tmp_path, whole_page):
    def change(values):
        return values | {
            f'vtorque_app_x{{label="{HOSTILE}"}}': 1.0,
            f"vtorque_app_{HOSTILE}": 2.0,
            f'vtorque_guest_disk_read_bytes_total{{device="{HOSTILE}"}}': 5.0,
        }

    names = ("job", "name", "owner", "node", "batch", "image")
    marks = kept_data.phases(10.0, 2)
    marks[1]["name"] = HOSTILE
    kept_data.make(
        tmp_path, seconds=10.0, guests=2, change=change, phases=marks,
        **dict.fromkeys(names, HOSTILE), status=HOSTILE, nodes=[HOSTILE, HOSTILE + "2"],
    )  # fmt: skip
    facts = json.loads((tmp_path / "job.json").read_text())
    for guest in facts["guests"]:
        guest["hostname"] = HOSTILE
    (tmp_path / "job.json").write_text(json.dumps(facts))
    text, seen = rendered(tmp_path)
    assert {*seen.elements} == {*whole_page[1].elements}
    assert {n for _, n, _ in seen.attributes} == {n for _, n, _ in whole_page[1].attributes}
    assert "".join(seen.words).count("<script>hack()</script>") >= 8
    assert "<script" not in text and "<img" not in text


def test_drawing_library_gets_no_user_text(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(plots, "svg", lambda w, h, spec: seen.append(repr(spec)) or "<svg ></svg>")
    change = lambda values: values | {"vtorque_app_secret{a='b'}": 1.0}  # noqa: E731
    marks = kept_data.phases(10.0, 1)
    marks[1]["name"] = "secret"
    text, _ = rendered(
        kept_data.make(tmp_path, seconds=10.0, change=change, name="secret", phases=marks)
    )
    assert len(seen) == 8 and "secret" in text
    assert not [spec for spec in seen if "secret" in spec or "loss" in spec]


@pytest.mark.parametrize(
    "change",
    [
        {"telemetry": False},
        {"telemetry": False, "phases": []},
        {"guests": 0, "telemetry": False},
        {"seconds": 0.5},
        {"phases": None},
        {"ended": None, "status": "", "started": kept_data.START + 1e6},
        {"ended": -5.0},
    ],
)
def test_page_of_a_short_job_is_valid(tmp_path, change):
    text, _ = rendered(kept_data.make(tmp_path, **{"seconds": 5.0} | change))
    assert "Job 42.srv" in text


def test_values_of_any_size_are_drawn(tmp_path):
    def change(values):
        extremes = (1e17, -1e17, 0.0, 1e-300)
        return values | {f"vtorque_app_v{n}": v for n, v in enumerate(extremes)}

    _, seen = rendered(kept_data.make(tmp_path, seconds=10.0, change=change))
    assert seen.elements.count("svg") == 11
    assert "NaN" not in "".join(str(value) for _, name, value in seen.attributes if name == "d")


def test_page_without_the_drawing_library_has_tables_and_a_note(tmp_path, whole_page, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # as if it were not installed
    text, seen = rendered(kept_data.make(tmp_path, seconds=600.0, guests=2))
    assert "svg" not in seen.elements and 'class="plot"' not in text
    assert seen.elements.count("table") == whole_page[1].elements.count("table")
    assert "because vl-convert-python is not installed" in text
    assert "without plots" not in whole_page[0]
