"""Mistakes of plugin authors: each error names the distribution, the module and the line."""

import re
import sys
import textwrap

import pytest
from click.testing import CliRunner

from vtorque_core.cli.admin import vtorque
from vtorque_core.config import plugins

PLUGIN = """
from dataclasses import dataclass
from vtorque_core.api import Option, constant_hook, count, hookimpl, setting
"""
NODE = """
from dataclasses import dataclass
from vtorque_core.api import Option, constant_hook, count, hookimpl, setting
from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_plan import GuestPlan

@dataclass(frozen=True)
class Card(Resource):
    kind = "acme-card"
    path: str
"""
BAD = "vtorque_bad_acme"


def after(half, text):
    """Return the source of a module with ``text`` appended."""
    return half.lstrip() + textwrap.dedent(text).lstrip()


# Module ("plugin" or "node"), its last lines, the expected message, and the start of the line.
BROKEN = {
    "missing hookimpl": ("plugin", """
        def vtorque_options():
            yield Option("cards", parse=count, default=0, help="cards")
        """, r"vtorque_options \(line {}\) has no @hookimpl", "def vtorque_options"),
    "missing hookimpl in the node module": ("node", """
        def vtorque_plan(guest):
            return ()
        """, r"vtorque_plan \(line {}\) has no @hookimpl", "def vtorque_plan"),
    "wrong type": ("plugin", """
        @hookimpl
        def vtorque_options():
            return ["cards"]
        """, r"returned str instead of an Option \({module}, line {}\)", "def vtorque_options"),
    "wrong type of a constant hook": ("plugin", """
        vtorque_guest_types = constant_hook("acmeos")
        """, r"returned str instead of a GuestType \({module}, line {}\)", "vtorque_g"),
    "wrong type in the node module": ("node", """
        vtorque_settings = constant_hook("cards")
        """, r"returned str instead of a class \({module}, line {}\)", "vtorque_settings"),
    "setting without doc": ("node", """
        @dataclass(frozen=True)
        class Settings:
            cards: int = setting(0)

        vtorque_settings = constant_hook(Settings)
        """, r"the setting cards has no doc \({module}, line {}\)", "vtorque_settings"),
    "setting as a plain field": ("node", """
        @dataclass(frozen=True)
        class Settings:
            cards: int = 0

        vtorque_settings = constant_hook(Settings)
        """, r"the setting cards has no doc \({module}, line {}\)", "vtorque_settings"),
    "option without help": ("plugin", """
        vtorque_options = constant_hook(Option("cards", parse=count, default=0, help=""))
        """, r"the option cards has no help \({module}, line {}\)", "vtorque_options"),
    "undeclared resource": ("node", """
        @hookimpl
        def vtorque_pre_boot(job):
            job.acquire(Card("/x"))
        """, r"{module}, line {}: acquires Card, which vtorque_resources does", "    job"),
    "resource of another plugin": ("node", """
        from vtorque_telemetry.process import Sampler

        @hookimpl
        def vtorque_pre_boot(job):
            job.acquire(Sampler(("x",)))
        """, r"{module}, line {}: acquires Sampler, which vtorque_resources does", "    job"),
    "private import": ("plugin", """
        from vtorque_core.config.site_config import Site
        """, r"{module}, line {}: imports vtorque_core.config.site_config.Site", "from vt"),
    "private import in a function": ("node", """
        @hookimpl
        def vtorque_plan(guest):
            import vtorque_core.records.journal
            return ()
        """, r"{module}, line {}: imports vtorque_core.records.journal", "    import"),
    "slow plugin module": ("plugin", """
        import time
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        """, r"{module}, line {}: importing it costs each vsub \d+ ms", "from dataclasses"),
}  # fmt: skip


@pytest.fixture
def list_errors(tmp_path, monkeypatch):
    """Return a function that installs a plugin of two halves, and returns the message about it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_costs", {})  # another test's plugin has the same name
    (tmp_path / "site.toml").write_text('[plugins]\nenable = ["acme", "local", "telemetry"]\n')

    def run(**halves):
        info = tmp_path / "acme_tools-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 2.5\n")
        points = {"plugin": "vtorque1", "node": "vtorque1.node"}
        with (info / "entry_points.txt").open("w") as file:
            for half, source in halves.items():
                (tmp_path / f"{BAD}_{half}.py").write_text(source)
                file.write(f"[{points[half]}]\nacme = {BAD}_{half}\n")
        config = ["plugins", "--config", str(tmp_path / "site.toml")]
        return CliRunner().invoke(vtorque, config)

    yield run
    for half in ("plugin", "node"):
        sys.modules.pop(f"{BAD}_{half}", None)


@pytest.mark.parametrize("what", BROKEN)
def test_error_names_distribution_module_and_line(list_errors, what):
    half, lines, said, begins = BROKEN[what]
    sources = {"plugin": PLUGIN.lstrip(), "node": NODE.lstrip()}
    sources[half] = after(sources[half], lines)
    numbered = list(enumerate(sources[half].splitlines(), start=1))
    line = [number for number, text in numbered if text.startswith(begins)][-1]
    if begins == "from dataclasses":
        line = 1
    done = list_errors(**sources)
    module = f"{BAD}_{half}"
    assert done.exit_code == (0 if what == "slow plugin module" else 1)
    assert re.search(said.format(line, module=module), done.output), done.output
    (about,) = [text for text in done.output.splitlines() if module in text]
    assert "acme-tools 2.5" in about or re.search(r"acme +broken +2.5", done.output)


def test_plugin_without_errors_is_not_mentioned(list_errors):
    well_made = after(NODE, """
        vtorque_resources = constant_hook(Card)

        @hookimpl
        def vtorque_pre_boot(job):
            job.acquire(Card("/x"))
        """)  # fmt: skip
    done = list_errors(plugin=PLUGIN.lstrip(), node=well_made)
    assert done.exit_code == 0, done.output
    assert "acme-tools" not in done.output and re.search("acme +on +2.5", done.output)
