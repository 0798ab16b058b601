"""A line means the same in OSv as in a shell, or it is refused with its number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vtorque_osv import script

from vtorque_core.api import Refused

NAMED = {"greet": "/prog hello", "both": "/a; /b"}


def words(text, named=NAMED):
    return [(each.words, each.end) for each in script.parse(text.encode(), named)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/a", [(("/a",), ";")]),
        ("#!/bin/bash\n#PBS -l nodes=1\n#VSUB -vm ram=64M\n\n  /a b  # why\n",
         [(("/a", "b"), ";")]),
        ('/a "b  c" d#e ""', [(("/a", "b  c", "d#e", ""), ";")]),
        ('/a "\\"x\\\\"', [(("/a", '"x\\'), ";")]),
        ("/a; /b & /c &! /d", [(("/a",), ";"), (("/b",), "&"), (("/c",), "&!"), (("/d",), ";")]),
        ("/a 1\n/a 2", [(("/a", "1"), ";"), (("/a", "2"), ";")]),
        ("/a \\\n  b\\\n  c", [(("/a", "b", "c"), ";")]),
        ("/a $HOME pre$X", [(("/a", "$HOME", "pre$X"), ";")]),
        ("greet you", [(("/prog", "hello", "you"), ";")]),
        ("/a --x=1,2 -y:z @%^+=", [(("/a", "--x=1,2", "-y:z", "@%^+="), ";")]),
        ("/a\r\n/b\r\n", [(("/a",), ";"), (("/b",), ";")]),
        ('/a "b|c>d*"', [(("/a", "b|c>d*"), ";")]),
    ],
)  # fmt: skip
def test_supported_lines_are_parsed(text, found):
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("/a\ncd /tmp", 2, "cd is a shell program, and OSv has no shell (fork fails there)"),
        (
            "#x\n\nif /a; then /b; fi",
            3,
            "if is a shell program, and OSv has no shell (fork fails there)",
        ),
        ("/a | /b", 1, "a pipe or ||"),
        ("/a > out", 1, "output redirection"),
        ("/a 2>&1", 1, "output redirection"),
        ("/a < in", 1, "input redirection"),
        ("/a && /b", 1, "&& needs a shell"),
        ("/a || /b", 1, "a pipe or ||"),
        ("/a `b`", 1, "command substitution"),
        ("/a $(b)", 1, "a subshell"),
        ("/a ${HOME}", 1, "brace expansion"),
        ("/a $HOME/x", 1, "OSv replaces $NAME only at the end of a"),
        ('/a "$HOME/x"', 1, "OSv replaces $NAME only at the end of a"),
        ("/a $1", 1, "OSv replaces $NAME only at the end of a"),
        ("/a 'b c'", 1, "single quotes"),
        ("/a *.dat", 1, "a file name pattern"),
        ("/a ~/x", 1, "a home directory"),
        ("/a !x", 1, "(!) needs a shell"),
        ("X=1 /a", 1, "setting a variable"),
        ("export X=1", 1, "export is a shell program, and OSv has no shell (fork fails there)"),
        ("/a\\ b", 1, "has another meaning in OSv"),
        ("/a \\n", 1, "has another meaning in OSv"),
        ('/a x"b c"', 1, 'double quotes must enclose a whole word: "a b"'),
        ('/a "b"c', 1, 'double quotes must enclose a whole word: "a b"'),
        ('/a "b', 1, 'double quotes must enclose a whole word: "a b"'),
        ("prog", 1, "is not an absolute path of a program in"),
        ("./prog", 1, "is not an absolute path of a program in"),
        ("/../x", 1, "is not an absolute path of a program in"),
        ("mpirun -n 2 /a", 1, "is not an absolute path of a program in"),
        ("; /a", 1, "a command is missing before"),
        ("/a ;; /b", 1, ";; needs a shell"),
        ("/a \u00e9", 1, "OSv supports printable ASCII only"),
        ("/a \x07", 1, "OSv supports printable ASCII only"),
        ("both", 1, "does not run exactly one program"),
    ],
)
def test_lines_that_need_a_shell_are_refused(text, line, why):
    with pytest.raises(Refused) as refused:
        words(text)
    message = str(refused.value)
    assert f"line {line} of the job script: " in message
    assert why in message


def test_every_bad_line_is_reported():
    with pytest.raises(Refused) as refused:
        words("cd /\n/a\nexport X=1\n")
    assert len(refused.value.refusals) == 2


@pytest.mark.parametrize("text", ["", "\n\n", "#!/bin/sh\n# nothing\n", "   \n"])
def test_empty_script_is_refused(text):
    with pytest.raises(Refused, match="no command line"):
        words(text)


def test_script_above_the_limit_is_refused():
    with pytest.raises(Refused, match="larger than 64 KiB"):
        words("/a x\n" * 20_000)


def test_commands_are_quoted_for_osv():
    commands = script.parse(b'/a "b c" ""\n/d "x\\"y" & /e\n', {})
    assert script.command_line(commands) == '/a "b c" "";  /d "x\\"y"& /e'.replace(";  ", "; ")


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)))
def test_quoting_and_reading_are_inverse(arguments):
    plain = [a for a in arguments if "$" not in a]
    command = script.ProgramCall(1, ("/prog", *plain))
    quoted = " ".join(["/prog", *('"' + a.replace("\\", "\\\\").replace('"', '\\"') + '"'
                                  for a in plain)])  # fmt: skip
    (found,) = script.parse(quoted.encode(), {})
    assert found.words == command.words


@given(st.binary(max_size=300))
def test_any_script_is_parsed_or_refused(content):
    try:
        commands = script.parse(content, NAMED)
    except Refused:
        return
    assert all(each.words[0].startswith("/") for each in commands)
    assert "\n" not in script.command_line(commands)
