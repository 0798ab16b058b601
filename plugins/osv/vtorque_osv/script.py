"""Parse a job script as OSv command lines, or report which lines OSv does not support. No I/O.

OSv has no shell, and ``fork`` fails. A line is accepted if it has the same meaning in OSv
(core/commands.cc) and in a POSIX shell. Other lines are rejected, with their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vtorque_core.api import Refusal, Refused

MAX_SCRIPT = 65536  # bytes
COMMAND_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}", re.ASCII)

_FIX = "write one program per line, by its absolute path in the image, with its arguments"
_KEYWORDS = frozenset({
    "if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac",
    "in", "function", "select", "time", "{", "}", "[[", "]]", "!", "(", ")",
})  # fmt: skip
_BUILTINS = frozenset({
    ".", ":", "[", "alias", "bg", "break", "builtin", "cd", "command", "continue", "declare",
    "echo", "eval", "exec", "exit", "export", "false", "fg", "getopts", "hash", "jobs", "kill",
    "let", "local", "module", "newgrp", "popd", "printf", "pushd", "pwd", "read", "readonly",
    "return", "set", "shift", "shopt", "sleep", "source", "test", "times", "trap", "true", "type",
    "typeset", "ulimit", "umask", "unalias", "unset", "wait",
})  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=", re.ASCII)
_VARIABLE = re.compile(r"[^$]*\$[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_WORD = re.compile(
    r'"(?P<quoted>(?:[^"\\]|\\["\\])*)"(?=[\s;&]|$)|(?P<plain>(?:[^\s;&!"\\]|\\["\\])+)'
)
_SHELL = {
    "|": "a pipe or ||", "<": "input redirection", ">": "output redirection",
    "`": "command substitution", "(": "a subshell or function", ")": "a subshell or function",
    "'": "single quotes (OSv groups with double quotes only)", "*": "a file name pattern",
    "?": "a file name pattern", "[": "a file name pattern", "~": "a home directory",
    "{": "brace expansion", "!": "history or negation",
}  # fmt: skip


@dataclass(frozen=True)
class ProgramCall:
    """One call of a program: its unquoted words, and how OSv continues.

    ``end`` is ``;`` (wait for the program), ``&`` (run it in the background and wait at the end) or
    ``&!`` (run it in the background and end it with the job).
    """

    line: int
    words: tuple[str, ...]
    end: str = ";"

    def text(self) -> str:
        """Return the command in OSv's syntax, without the separator ``end``."""
        return " ".join(quote_word(word) for word in self.words)


def command_line(commands: Sequence[ProgramCall]) -> str:
    """Return all commands as one OSv command line."""
    parts = [f"{each.text()}{each.end}" for each in commands]
    return " ".join(parts).removesuffix(";")


def parse(content: bytes, named: Mapping[str, str]) -> tuple[ProgramCall, ...]:
    """Return the script's commands. Raises Refused with every unsupported line.

    ``named`` maps names to the image's command lines. If a line of the script starts with such a
    name, the name is replaced by the command line.
    """
    commands: list[ProgramCall] = []
    refusals: list[Refusal] = []
    for number, line in _lines(content):
        try:
            commands += _commands(number, line, named)
        except ValueError as error:
            refusals.append(Refusal(f"line {number} of the job script: {error}", fix=_FIX))
    if not commands and not refusals:
        refusals.append(Refusal("the job script contains no command line", fix=_FIX))
    if refusals:
        raise Refused(*refusals[:20])
    return tuple(commands)


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    r"""Yield (number, text) of all lines except comments, with lines joined at a final ``\``."""
    if len(content) > MAX_SCRIPT:
        raise Refused(f"the job script is larger than {MAX_SCRIPT >> 10} KiB, the limit of OSv")
    begin, joined = 0, ""
    text = content.decode("utf-8", "replace")
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        begin = begin or number
        if not joined and line.lstrip().startswith("#"):
            begin = 0
        elif line.endswith("\\") and not line.endswith("\\\\"):
            joined += line[:-1] + " "
        else:
            if (joined + line).strip():
                yield begin, joined + line
            begin, joined = 0, ""
    if joined.strip():
        yield begin, joined


def _commands(number: int, line: str, named: Mapping[str, str]) -> Iterator[ProgramCall]:
    bad = next((c for c in line if c != "\t" and not " " <= c <= "~"), None)
    if bad is not None:
        raise ValueError(f"contains the character {bad!r}; OSv supports printable ASCII only")
    words: list[str] = []
    at = 0
    while at < len(line):
        if line[at].isspace():
            at += 1
        elif line[at] == "#":  # at the start of a word: a comment, as in a shell
            break
        elif line[at] in ";&":
            end = line[at : at + 2] if line[at : at + 2] in ("&!", "&&", ";;") else line[at]
            if end in ("&&", ";;"):
                raise ValueError(f"{end} needs a shell")
            if not words:
                raise ValueError(f"a command is missing before {end}")
            yield _command(number, words, end, named)
            words, at = [], at + len(end)
        else:
            at = _word(line, at, words)
    if words:
        yield _command(number, words, ";", named)


def _word(line: str, at: int, words: list[str]) -> int:
    found = _WORD.match(line, at)
    if found is None:
        raise ValueError(f"{_problem(line[at:])}")
    quoted, plain = found["quoted"], found["plain"]
    text = quoted if plain is None else plain
    following = line[found.end() : found.end() + 1]
    if plain is not None:
        shell = next((c for c in plain if c in _SHELL), None)
        if shell is not None:
            raise ValueError(f"{_SHELL[shell]} ({shell}) needs a shell")
        if following and following not in " \t;&":
            raise ValueError(_problem(line[found.end() :]))
    if "$" in text and not _VARIABLE.fullmatch(text):
        raise ValueError(
            f"{text}: OSv replaces $NAME only at the end of a word; other expansions need a shell"
        )
    words.append(re.sub(r'\\(["\\])', r"\1", text))
    return found.end()


def _problem(rest: str) -> str:
    if rest.startswith("\\"):
        return '\\ before characters other than " and \\ has another meaning in OSv'
    if rest.startswith('"'):
        return 'double quotes must enclose a whole word: "a b"'
    return f"{_SHELL.get(rest[0], rest[0])} ({rest[0]}) needs a shell"


def _command(number: int, words: list[str], end: str, named: Mapping[str, str]) -> ProgramCall:
    first = words[0]
    if first in named:
        inside = list(_commands(number, named[first], {}))
        if len(inside) != 1 or inside[0].end != ";":
            raise ValueError(f"the image's command {first} does not run exactly one program")
        return ProgramCall(number, (*inside[0].words, *words[1:]), end)
    if first in _KEYWORDS or first in _BUILTINS:
        raise ValueError(f"{first} is a shell program, and OSv has no shell (fork fails there)")
    if _ASSIGNMENT.match(first):
        raise ValueError(f"{first}: setting a variable needs a shell; use vsub -v {first}")
    if not first.startswith("/") or "/../" in f"{first}/":
        known = f"; this image has the commands {', '.join(sorted(named))}" if named else ""
        raise ValueError(f"{first} is not an absolute path of a program in the image{known}")
    return ProgramCall(number, tuple(words), end)


def quote_word(word: str) -> str:
    """Quote a word for OSv's commands (core/commands.cc)."""
    if word and not re.search(r'[\s;&!"\\]', word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
