"""Double of Torque's and OpenPBS's commands: qsub, qstat, qalter, pbsnodes, qmgr and the like.

``run(DIRECTORY, SYSTEM, PROGRAM)`` stands for each of them; all share ``DIRECTORY/state.json``.
Their behavior was observed with the real commands (Torque 6.1.3, OpenPBS 23.06), or read in the
source where "(src)" is noted. No code of the product is used here, so that a mistake is not
repeated.
"""

import fcntl
import getopt
import json
import os
import pwd
import re
import shlex
import signal
import stat
import sys
from contextlib import contextmanager
from pathlib import Path

GETOPT = {
    "torque": "a:A:b:c:C:d:D:e:EfF:hi:Ij:J:k:K:l:L:m:M:nN:o:p:P:q:r:S:t:T:u:v:Vw:W:Xxz",
    "openpbs": "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:",
}
SERVER = "server"
BROKEN = "qmgr obj=n1 svr=default: PBS_Server System error: Bad file descriptor"
UNANSWERED = object()
NO_SERVER = "cannot connect to server (null) (errno=15137) could not connect to trqauthd"


@contextmanager
def shared(directory):
    """Yield the state, and write it back."""
    with (Path(directory) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = Path(directory) / "state.json"
        state = json.loads(path.read_text())
        yield state
        new = path.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(path)


class CommandError(Exception):
    """Ends the command with (code, words on stderr)."""


def say(line):
    sys.stdout.write(f"{line}\n")


def main(directory, system, program, *argv):
    if program == "qsub":
        return qsub(Path(directory), system, list(argv))
    with shared(directory) as state:
        state["calls"].append([program, *argv])
        if not state["up"]:
            raise CommandError(2, f"{program}: {NO_SERVER}")
        code = globals()[program](state, system, list(argv))
    if code is UNANSWERED:
        signal.pause()
    return code


# -- qsub -------------------------------------------------------------------------------------


def qsub(directory, system, argv):
    call = {"argv": argv, "environ": dict(os.environ), "id": None}
    answer = directory / "answer.json"
    if answer.exists():
        said = json.loads(answer.read_text())
        answer.unlink()
        note(directory, call)
        sys.stdout.buffer.write(bytes.fromhex(said["out"]))
        sys.stderr.buffer.write(bytes.fromhex(said["err"]))
        return said["code"]
    job = describe(system, argv)
    if isinstance(job, str):
        say(job)
        note(directory, call)
        return 0
    with shared(directory) as state:
        if not state["up"]:
            raise CommandError(2, f"qsub: {NO_SERVER}")
        state["last"] += 1
        job["seq"] = state["last"]
        array = "[]" if job["array"] else ""
        job["id"] = call["id"] = f"{job['seq']}{array}.{SERVER}"
        script = directory / f"{job['seq']}.script"
        if job["content"] is not None:
            script.write_bytes(bytes.fromhex(job.pop("content")))
            job["script"] = str(script)
        state["jobs"][job["id"]] = job
    note(directory, call)
    if "z" not in job["flags"]:
        say(job["id"])
    return 0


def note(directory, call):
    (directory / "qsub.json").write_text(json.dumps(call))


def describe(system, argv):  # noqa: PLR0912 (as long as qsub has options)
    """Return the job, or the text that is only printed."""
    words, command = list(argv), None
    if system == "openpbs" and "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
        if not command:
            raise CommandError(2, "usage: qsub [options] [script | -- command [args]]")
    try:
        # OpenPBS's own getopt stops at the script.
        read_options = getopt.gnu_getopt if system == "torque" else getopt.getopt
        options, operands = read_options(words, GETOPT[system], ["version", "about"])
    except getopt.GetoptError as error:
        raise CommandError(
            2 if system == "openpbs" else 1, f"qsub: {error}\nusage: qsub ..."
        ) from None
    given = [name for name, _ in options]
    if "--version" in given or "--about" in given:
        return "Version: 6.1.3.h5" if system == "torque" else "pbs_version = 23.06.06"
    interactive = "-I" in given
    if len(operands) > 1 and not interactive:
        raise CommandError(
            1, "qsub: illegally formed job identifier, or extra operands\nusage: qsub ..."
        )
    script = find_job_script(argv) if system == "torque" else (operands or [""])[0]
    name, content, prefix = "STDIN", b"", dict(options).get("-C", "#PBS")
    if script not in ("", "-") and "-x" not in given:
        name, content = Path(script).name[:236], read(script)
    elif command is None and not interactive:
        content = sys.stdin.buffer.read()
    if system == "openpbs" and "-C" not in given:
        prefix = os.environ.get("PBS_DPREFIX", "#PBS")
    below = []
    if command is None:
        for line in directives(content, prefix):
            try:
                below += getopt.gnu_getopt(shlex.split(line), GETOPT[system])[0]
            except (ValueError, getopt.GetoptError) as error:
                raise CommandError(1, f"qsub: directive error: {line[:60]!r}: {error}") from None
    resources, last = {}, {}
    for option, value in [o for o in below if o[0] != "-I"] + options:
        if option == "-l":
            resources |= dict(
                item.split("=", 1) if "=" in item else (item, "")
                for item in re.split(r",(?=[A-Za-z_.]+(?:=|$))", value)
            )
        last[option] = value
    if system == "openpbs" and "select" in resources:
        mixed = {"ncpus", "mem", "nodes"} & set(resources)
        if mixed:
            raise CommandError(
                1, f'qsub: "-lresource=" cannot be used with "select" or "place": {mixed}'
            )
    if system == "torque" and "nodes" in resources and {"ncpus", "size"} & set(resources):
        raise CommandError(1, "qsub: Jobs may not mix -l nodes with -l size or -l ncpus\n")
    account = pwd.getpwuid(os.getuid())
    variables = {"PBS_O_HOME": account.pw_dir, "PBS_O_WORKDIR": str(Path.cwd())}
    if "-V" in last:
        variables |= dict(os.environ)
    for item in filter(None, split_list(last.get("-v", ""))):
        key, equals, value = item.partition("=")
        if equals or key in os.environ:
            variables[key] = value if equals else os.environ[key]
        else:
            raise CommandError(1, "qsub: cannot send environment with the job")
    return {
        "name": last.get("-N", name), "owner": account.pw_name, "state": "Q", "hold": "n",
        "resources": resources, "variables": variables, "shell": last.get("-S", ""),
        "args": last.get("-F", ""), "interactive": interactive, "command": command,
        "inter_cmd": " ".join(operands) if "-x" in given else "",
        "array": last.get("-t", last.get("-J", "")), "exec_host": "", "start_count": 0,
        "type": last.get("-T", ""), "rerunable": last.get("-r", "y"),
        "flags": "".join(option[1:] for option, value in options if not value),
        "script": None, "content": None if interactive or command else content.hex(),
    }  # fmt: skip


def find_job_script(argv):
    """Return the script that Torque's qsub finds, or "" (``find_job_script_index`` of its source).

    qsub searches the letter of an option, followed by a colon, in a string that ends with ``-:``.
    A lone dash has no letter, so qsub finds its colon and skips the next word.
    """
    ignore_next = False
    for word in argv:
        if ignore_next:
            ignore_next = False
        elif not word.startswith("-"):
            return word
        elif not word.startswith("-I"):
            ignore_next = f"{word[1:2]}:" in f"{GETOPT['torque']}-:" and len(word) <= 2
    return ""


def read(script):
    try:
        status = Path(script).stat()
    except OSError as error:
        raise CommandError(
            1, f"qsub: script file '{script}' cannot be loaded - {error.strerror}"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise CommandError(1, f"qsub: script not a file: {script}")
    return Path(script).read_bytes()


def directives(content, prefix):
    """Yield the words after the prefix, up to the first executable line (qsub(1B))."""
    for line in content.decode("utf-8", "surrogateescape").split("\n"):
        text = line.strip()
        if prefix and text.startswith(prefix):
            yield text[len(prefix) :]
        elif text and not text.startswith("#") and not line.startswith(":"):
            return


def split_list(text):
    """Split a ``-v`` value at commas that are not quoted."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = ",", True, ""
    return list(lexer)


# -- The other commands ----------------------------------------------------------------------------


def find(state, job_id, program):
    parent = re.sub(r"\[[0-9]+\]", "[]", job_id)
    job = state["jobs"].get(job_id) or state["jobs"].get(parent)
    if job is None:
        raise CommandError(153, f"{program}: Unknown Job Id {job_id}")
    return job


def qstat(state, system, argv):
    form, ids = argv[0], argv[1:]
    jobs = [(i, find(state, i, "qstat")) for i in ids] or list(state["jobs"].items())
    if system == "torque":
        assert form == "-x", argv
        say("<Data>" + "".join(torque_xml(*job) for job in jobs) + "</Data>")
        return 0
    assert form in ("-fw", "-ftw"), argv
    for job_id, job in jobs:
        if job["state"] == "F":
            raise CommandError(35, f"qstat: {job_id} Job has finished, use -x or -H to obtain ...")
        say(f"Job Id: {job_id}\n    Job_Name = {job['name']}\n    Job_Owner = {job['owner']}@h")
        say(f"    job_state = {job['state']}\n    Hold_Types = {job['hold']}")
        for key, value in job["resources"].items():
            say(f"    Resource_List.{key} = {value}")
        if job["exec_host"]:
            say(f"    exec_host = {job['exec_host']}")
        variables = listed(job, system).replace("\n", "\\n")  # qstat.c, convert_feed_chars
        say(f"    Variable_List = {variables}\n    run_count = {job['start_count']}\n")
    return 0


def listed(job, system):
    pairs = (f"{key}={value}" for key, value in job["variables"].items())
    return ",".join(pair.replace(",", "\\,") if system == "openpbs" else pair for pair in pairs)


def torque_xml(job_id, job):
    def element(name, text):
        return f"<{name}>{str(text).replace('<', '&lt;')}</{name}>" if text != "" else ""

    parts = [
        element("Job_Id", job_id), element("Job_Name", job["name"]),
        element("Job_Owner", f"{job['owner']}@{SERVER}"), element("job_state", job["state"]),
        element("exec_host", job["exec_host"]), element("Hold_Types", job["hold"]),
        element("exec_gpus", job.get("exec_gpus", "")),
        element("interactive", "True") if job["interactive"] else "",
        element("Rerunable", str(job.get("rerunable", "y") == "y")),
        "<Resource_List>" + "".join(element(*r) for r in job["resources"].items())
        + "</Resource_List>",
        element("Variable_List", listed(job, "torque")),
        element("start_count", job["start_count"] or ""),
        element("comment", job.get("comment", "")),
    ]  # fmt: skip
    return "<Job>" + "".join(parts) + "</Job>"


def qhold(state, system, argv):
    assert argv[:2] == ["-h", "s"], argv
    find(state, argv[2], "qhold")["hold"] = "s"
    return 0


def qalter(state, system, argv):
    """Both take -a and, from a manager, a comment of a running job, and keep them."""
    job = find(state, argv[-1], "qalter")
    if not state["manager"]:
        raise CommandError(159, f"qalter: Unauthorized Request  {argv[-1]}")
    for option, value in getopt.getopt(argv[:-1], "a:W:l:")[0]:
        if option == "-l":
            if job["state"] == "R" and system == "torque" and value.startswith("walltime="):
                if not state.get("qalter_fails"):
                    job["resources"]["walltime"] = value.partition("=")[2]
                return UNANSWERED  # observed with 6.1.3.h5: the walltime changes nevertheless
            if job["state"] in "RE":
                if job.get("rerun"):  # Torque's qrerun ends before the job
                    job |= {"state": "H", "exec_host": ""}
                sys.stderr.write("qalter: Cannot modify attribute while job running\n")
                return 169
            name, _, text = value.partition("=")
            job["resources"][name] = text
            continue
        if option == "-a":
            assert re.fullmatch(r"[0-9]{12}\.[0-9]{2}", value), value
            job["not_before"] = value
            continue
        for pair in value.split(","):
            name, equals, text = pair.partition("=")
            known = ("comment", *(["run_count"] if system == "openpbs" else []))
            if not equals or name not in known:
                raise CommandError(154, f"qalter: Undefined attribute  {argv[-1]}")
            job["start_count" if name == "run_count" else name] = (
                int(text) if name == "run_count" else text
            )
    return 0


def qrerun(state, system, argv):
    job = find(state, argv[0], "qrerun")
    if job["state"] not in "RE":
        raise CommandError(168, f"qrerun: Request invalid for state of job {argv[0]}")
    job["rerun"] = True
    if job["hold"] != "n" and system == "openpbs":
        job |= {"state": "H", "exec_host": ""}
    return 0


def qdel(state, system, argv):
    job = find(state, argv[0], "qdel")
    if job["owner"] != pwd.getpwuid(os.getuid()).pw_name and os.geteuid():
        raise CommandError(159, f"qdel: Unauthorized Request  {argv[0]}")
    if job["state"] == "C":
        raise CommandError(
            170, f"qdel: Request invalid for state of job MSG=invalid state {argv[0]}"
        )
    job["deleted"] = True
    return 0


def pbsnodes(state, system, argv):
    if argv[0] in ("-N", "-C"):
        name, key = argv[2], "note" if argv[0] == "-N" else "comment"
        node = state["nodes"][name]
        if node.get("broken"):
            raise CommandError(2, BROKEN)
        node.pop(key, None)
        if argv[1]:
            node[key] = argv[1]
        return 0
    option, *names = argv
    if option == "-o":
        state["nodes"][names[0]]["state"] = "offline"
        return 0
    if option == ("-c" if system == "torque" else "-r"):
        state["nodes"][names[0]]["state"] = "free"
        return 0
    assert option == ("-a" if system == "torque" else "-av"), argv
    for name, node in state["nodes"].items():
        if names and name not in names:
            continue
        say(name)
        for key, value in node.items():
            say(f"     {key} = {value}")
        say("")
    return 0


def qmgr(state, system, argv):
    assert argv[0] == "-c", argv
    command = argv[1]
    if command == "list server":
        say(f"Server {SERVER}\n\tserver_state = Active\n\tmanagers = {state['managers']}")
        return 0
    if not state["manager"]:
        raise CommandError(159, "qmgr obj=n1 svr=default: Unauthorized Request")
    match = re.fullmatch(r"(set|unset) node (\S+) (\S+)(?: (\+=|-=|=) (\S+))?", command)
    if match:
        return set_node(state, *match.groups())
    match = re.fullmatch(r"(list|create|delete) resource (\w+).*", command)
    if match:
        return own_resource(state, match[1], match[2])
    match = re.fullmatch(r"(\w+) hook (\S+) ?(.*)", command)
    assert match, command
    if not state.get("at_server", True):  # only root on the server's host, manager or not
        said = "root@n1 is unauthorized to access hooks data from server " + SERVER
        raise CommandError(1, f"qmgr obj={match[2]} svr=default: {said}\nqmgr: hook error returned")
    return hook(state, *match.groups())


def set_node(state, verb, name, key, sign, value):
    node = state["nodes"][name]
    if verb == "unset":
        node.pop(key, None)
    elif sign == "=":
        node[key] = value
    else:
        if node.get("broken"):
            raise CommandError(2, BROKEN)
        found = [p for p in node.get(key, "").split(",") if p and p != value]
        found += [value] * (sign == "+=")
        node[key] = ",".join(found)
        if not found:  # observed: no later change of this node works, not even of its note
            del node[key]
            node["broken"] = "1"
    return 0


def own_resource(state, verb, name):
    if verb != "create" and name not in state["resources"]:
        raise CommandError(1, f"qmgr obj={name} svr=default: Unknown resource")
    if verb == "create":
        state["resources"] = sorted({*state["resources"], name})
    elif verb == "delete" and state.get("busy"):  # in use by a job, also one in the history
        busy = f"qmgr obj={name} svr=default: Resource busy on job\nqmgr: Error (15174) returned"
        raise CommandError(70, busy)
    elif verb == "delete":
        state["resources"].remove(name)
    else:
        say(f"Resource {name}\n    type = boolean\n    flag = h")
    return 0


def hook(state, verb, name, rest):
    hooks = state["hooks"]
    if verb == "create":
        hooks[name] = {"type": "site", "enabled": "true", "alarm": "30", "order": "1"}
        return 0
    if name not in hooks:
        raise CommandError(1, f"qmgr obj={name} svr=default: hook not found")
    if verb == "set":
        key, _, value = rest.partition(" = ")
        hooks[name][key] = value
    elif verb == "import":
        hooks[name]["content"] = Path(rest.split()[-1]).read_text()
    elif verb == "export":
        sys.stdout.write(hooks[name]["content"])
    elif verb == "delete":
        del hooks[name]
    else:
        say(f"Hook {name}")
        for key, value in hooks[name].items():
            if key != "content":
                say(f"    {key} = {value}")
    return 0


def run(*given):
    """Run the program that these words name. The tests start it a thousand times."""
    try:
        code = main(*given, *sys.argv[1:])
    except CommandError as bad:
        code, words = bad.args
        sys.stderr.write(f"{words}\n")
    sys.exit(code)
