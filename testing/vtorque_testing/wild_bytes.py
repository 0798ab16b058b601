"""Job scripts with unusual bytes: line ends, encodings, lengths, control characters."""

from __future__ import annotations

RUNS = {
    "crlf-body.sh": "micro",
    "latin1-directive.sh": "micro",
    "sjis.sh": "micro",
    "nul-in-comment.sh": "micro",
    "no-final-newline-heredoc.sh": "micro",
    "long-comment.sh": "micro",
    "form-feed.sh": "hpc",
    "bell.sh": "micro",
    "binary-payload.sh": "hpc",
    "latin1-comment.sh": "micro",
    "latin1-output.sh": "micro",
    "utf8-output.sh": "micro",
    "nul-after-exit.sh": "micro",
    "no-final-newline.sh": "micro",
    "five-thousand-lines.sh": "micro",
    "long-line.sh": "micro",
    "long-heredoc.sh": "micro",
    "trailing-blanks.sh": "micro",
    "tabs-heredoc.sh": "micro",
    "many-blank-lines.sh": "micro",
    "self-extracting.sh": "micro",
}


def make_scripts() -> dict[str, bytes]:
    """Return the scripts by name."""
    return {
        # Edited on Windows: sh takes the carriage return as part of each word.
        "crlf.sh": b"#!/bin/sh\r\n#PBS -N windows\r\n#PBS -l walltime=00:10:00\r\necho hello\r\n",
        "crlf-body.sh": b"#!/bin/sh\n#PBS -N mixed\necho one\necho two\r\nexit 0\n",
        "crlf-directives.sh": b"#!/bin/bash\r\n#PBS -j oe\r\n\r\ncd $PBS_O_WORKDIR\r\n./run\r\n",
        "cr-only.sh": b"#!/bin/sh\recho old mac\rexit 0\r",
        "bom.sh": b"\xef\xbb\xbf#!/bin/sh\n#PBS -N bom\necho from notepad\n",
        "utf16.sh": "#!/bin/sh\necho saved as unicode\n".encode("utf-16"),
        "latin1-comment.sh": b"#!/bin/sh\n# Ren\xe9 Lef\xe8vre, \xe9t\xe9 2009\necho fini\n",
        "latin1-output.sh": b"#!/bin/sh\nprintf 'Gr\xfc\xdfe \xb5m \xb0C\\n'\n",
        "latin1-directive.sh": b"#!/bin/sh\n#PBS -o r\xe9sultat.log\necho ok\n",
        "utf8-output.sh": "#!/bin/sh\n# Größe in µm\necho 'Überschuß: 3 µm, 漢字 🐍'\n".encode(),
        "sjis.sh": "#!/bin/sh\n# 計算ジョブ 表示\necho 表\n".encode("shift_jis"),
        "nul-after-exit.sh": b"#!/bin/bash\necho before\nexit 4\n\0\0\0binary\0tail\xff\xfe\n",
        "nul-in-comment.sh": b"#!/bin/sh\n# from a crashed editor: \0\0\0\necho still here\n",
        "no-final-newline.sh": b"#!/bin/sh\necho first\necho last; exit 5",
        "no-final-newline-heredoc.sh": b"#!/bin/bash\ncat <<EOF 2>/dev/null\nunfinished\nEOF",
        "only-a-comment.sh": b"# nothing yet\n",
        "empty.sh": b"",
        "one-newline.sh": b"\n",
        "only-directives.sh": b"#!/bin/sh\n#PBS -N later\n#PBS -l nodes=1:ppn=1\n",
        "five-thousand-lines.sh": _generate_sweep(),
        "long-line.sh": b"#!/bin/sh\nset -- " + b" ".join(b"%d" % i for i in range(9000))
        + b'\necho $# "${9000}"\n',
        "very-long-line.sh": b"#!/bin/sh\n: '" + b"x" * 1_000_000 + b"'\necho done\n",
        "long-comment.sh": b"#!/bin/sh\n#" + b"=" * 70_000 + b"\n#PBS -N after_it\necho done\n",
        "long-heredoc.sh": b"#!/bin/sh\nwc -l <<'END'\n"
        + b"".join(b"%6d %s\n" % (i, b"ACGT" * 15) for i in range(1500)) + b"END\n",
        "trailing-blanks.sh": b"#!/bin/sh   \n#PBS -N blanks   \necho a   \nexit 6  \t \n",
        "form-feed.sh": b"#!/bin/sh\n# part one\n\x0c\n# part two\necho parted\n",
        "bell.sh": b"#!/bin/sh\nprintf '\x07done\x1b[0m\n'\n",
        "tabs-heredoc.sh": b"#!/bin/sh\nif true; then\n\tcat <<-EOT\n\t\tindented\n\tEOT\nfi\n",
        "many-blank-lines.sh": b"#!/bin/sh\n" + b"\n" * 400 + b"#PBS -N far_down\necho here\n",
        "self-extracting.sh": b"#!/bin/sh\nsed '1,/^__DATA__$/d' \"$0\" | wc -l\nexit 0\n__DATA__\n"
        + b"".join(b"%d,%d\n" % (i, i * i) for i in range(300)),
        "binary-payload.sh": b"#!/bin/sh\ntail -n +4 $0 | gunzip > data; exit\n# payload:\n"
        + bytes(range(256)) * 20,
    }  # fmt: skip


def _generate_sweep() -> bytes:
    lines = ["#!/bin/sh", "#PBS -N sweep", "n=0"]
    for i in range(4994):
        lines.append(f"n=$((n + {i * 7919 % 97}))  # alpha={i % 10}.{i % 7} beta={i // 100}")
    return "\n".join([*lines, 'echo "sum $n"', "exit $((n % 50))", ""]).encode()
