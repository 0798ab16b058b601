"""Facts about the node for the service of a plugin's batch system."""

import sys

from vtorque_core.live.service import paths, site_and_installation

CONFIG = """
[paths]
state = "{0}/state"
run = "{0}/run"
[node]
start_timeout = 100
teardown_timeout = 20
grace = 7
"""


def test_programs_and_times_match_the_config(tmp_path, monkeypatch):
    config = tmp_path / "vtorque.toml"
    config.write_text(CONFIG.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    site, vtorque = site_and_installation(config.relative_to(tmp_path))
    assert site.paths.state == tmp_path / "state"
    python = [f"{sys.prefix}/bin/python3", "-I", "-m", "vtorque_core.cli.vtorque"]
    assert list(vtorque.call("reap")) == [*python, "reap", "--config", str(config)]
    assert list(vtorque.hook("epilogue", "1.x"))[-5:] == [
        "hook", "--config", str(config), "epilogue", "1.x",
    ]  # fmt: skip
    assert (vtorque.start_time, vtorque.end_time, vtorque.grace) == (120, 20, 7)


def test_paths_are_known_despite_other_config_errors(tmp_path):
    config = tmp_path / "vtorque.toml"
    config.write_text(CONFIG.format(tmp_path) + "unheard_of = 1\n")
    assert paths(config).run == tmp_path / "run"
