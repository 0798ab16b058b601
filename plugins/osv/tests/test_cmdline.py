import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vtorque_osv import cmdline, script

from vtorque_core.api import Refused
from vtorque_core.api.guest_plan import Address

STATIC = Address("52:54:00:00:00:01", "10.1.0.5", 20, "10.1.0.1", ("10.1.0.2", "9.9.9.9"))
SECOND = Address("52:54:00:00:00:02", "10.2.0.5", 24, network="two")
DHCP = Address("52:54:00:00:00:03")


def osv_split(line):
    """Split like OSv: stresep() of libc/string/stresep.c, then loader_parse_cmdline()."""
    options, at = [], 0
    while at < len(line):
        if line[at] in " \t\n":
            at += 1
            continue
        if line[at] != "-":
            return options, line[at:]
        word = ""
        while at < len(line) and line[at] not in " \t\n":
            while at < len(line) and line[at] == "\\":
                at += 1
            word += line[at : at + 1] if at < len(line) else ""
            at += 1
        options.append(word)
    return options, ""


def osv_script(text):
    """Parse a script's line as OSv does (core/commands.cc), for one command."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|((?:[^ "])+)', text)
    plain = {"n": "\n", "\\": "\\", '"': '"'}
    found = [re.sub(r"\\(.)", lambda m: plain[m[1]], a) if a or not b else b for a, b in words]
    return [w for w in found if w.startswith("--env=")], [w for w in found if w[:6] != "--env="]


def test_boot_line_has_all_options():
    options = [*cmdline.base_options(), *cmdline.network_options((STATIC, SECOND)),
               *cmdline.mount_options(["/data"])]  # fmt: skip
    line = cmdline.boot_line(options, {"A": "b c", "D": "$e f"}, "runscript /dev/vblk1")
    assert line == (
        "--verbose --power-off-on-abort --console=serial --noinit"
        " --ip=eth0,10.1.0.5,255.255.240.0 --ip=eth1,10.2.0.5,255.255.255.0"
        " --defaultgw=10.1.0.1 --nameserver=10.1.0.2"
        " --mount-fs=virtiofs,/dev/virtiofs0,/data"
        " --env=D=$e\\ f runscript /dev/vblk1"
    )


def test_script_disk_has_all_commands():
    commands = script.parse(b'/hello "x y"\n/b\n', {})
    text = cmdline.script_disk({"A": "b c", "D": "$e"}, commands)
    line, padding = text.split(b"\n")
    assert line == b'"--env=A=b c" --env=VTORQUE_OUTPUT=begins /hello "x y"; /b'
    assert len(text) % 512 == 0
    assert len(padding) >= 4096  # OSv's stdio drops the end of a device
    assert not padding.strip()


def test_dhcp_is_the_default_of_osv():
    assert cmdline.network_options((DHCP,)) == []
    assert cmdline.network_options(()) == []


@pytest.mark.parametrize("addresses", [(Address("52:54:00:00:00:01", dhcp=False),), (STATIC, DHCP)])
def test_unsupported_networks_are_refused(addresses):
    with pytest.raises(Refused):
        cmdline.network_options(addresses)


def test_variables_that_osv_gets():
    given_ = {"A": "1", "PATH": "/bin", "LD_PRELOAD": "x", "B": "two\nlines", "C": "a\\b",
              "BASH_FUNC_x%%": "() {", "OSV_IP": "1.2.3.4", "D": "", "E": "\u00e9",
              "F": "$x\\", "G": "$x"}  # fmt: skip
    assert cmdline.guest_variables(given_) == {
        "A": "1", "B": "two\nlines", "C": "a\\b", "D": "", "G": "$x",
    }  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True),
                       st.text(st.characters(max_codepoint=126), max_size=20)))  # fmt: skip
def test_boot_line_and_script_disk_are_parsed_back_by_osv_rules(environ):
    wanted = cmdline.guest_variables(environ)
    options, rest = osv_split(cmdline.boot_line(["--verbose"], wanted, "/a b"))
    text = cmdline.script_disk(wanted, script.parse(b"/a b", {})).decode()
    variables, words = osv_script(text.split("\n")[0])
    assert (options.pop(0), rest, words) == ("--verbose", "/a b", ["/a", "b"])
    assert variables.pop() == "--env=VTORQUE_OUTPUT=begins"
    assert sorted(options + variables) == sorted(f"--env={n}={v}" for n, v in wanted.items())


def test_command_line_above_the_limit_is_refused():
    with pytest.raises(Refused, match=r"submit with fewer variables \(-v NAME"):
        cmdline.boot_line([], {"A": "$" + "x" * cmdline.MAX_CMDLINE}, "/a")
    with pytest.raises(Refused, match="fewer variables"):
        cmdline.script_disk({"A": "x" * cmdline.MAX_SCRIPT_DISK}, script.parse(b"/a", {}))
