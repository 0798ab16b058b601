"""Warnings from a plugin's action hook reach the user before the job's first errors."""

import json

import device_cases
from device_cases import Case, load
from vtorque_core.api.values import hookimpl


class Warns:
    @hookimpl
    def vtorque_post_boot(self, job):
        job.warn("runs without\x1b[2J a sampler")
        job.warn("runs without\x1b[2J a sampler")
        job.warn("and without another")


def test_warning_of_a_hook_is_printed_once(tmp_path, capfd):
    plugins = load([])
    plugins.register("warns", Warns(), "vtorque-warns 1")
    node = device_cases.node(tmp_path / "node", plugins, Case({}))
    assert not node.start(node.job({})).error
    detail = json.loads(node.site.paths.proof("1").read_text())["detail"]
    assert detail == ["runs without\x1b[2J a sampler", "and without another"]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        r"vtorque: warning: runs without\x1b[2J a sampler",
        "vtorque: warning: and without another",
    ]
    node.release()
