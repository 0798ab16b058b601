"""Doubles of sbatch, squeue and scontrol, with the observed behavior of Slurm 22.05's.

They keep each job as a JSON file in a directory; if that has a file ``down``, the controller does
not answer.
"""

import json
from pathlib import Path

from quick_python import shebang

SBATCH = r"""
import json, os, sys
from pathlib import Path
top = Path(TOP)
def fail(code, text):
    sys.stderr.write(text); sys.exit(code)
argv = sys.argv[1:]
body = sys.stdin.buffer.read()
if not body:
    body = Path(argv[-1]).read_bytes() if argv and os.path.isfile(argv[-1]) else b""
if not body:
    fail(1, "sbatch: error: Batch script is empty!\n")
if not body.strip():
    fail(1, "sbatch: error: Batch script contains only whitespace!\n")
if not body.startswith(b"#!"):
    fail(1, "sbatch: error: This does not look like a batch script.  The first\n")
if b"\0" in body:
    fail(1, "sbatch: error: The Slurm controller does not allow scripts that\n"
         "sbatch: error: contain a NULL character '\\0'.\n")
if b"\r\n" in body:
    fail(1, "sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n")
comment = ""
for line in body.decode("utf-8", "surrogateescape").split("\n"):
    if line.startswith("#SBATCH --comment="):
        comment = line.partition("=")[2].strip("\"' ")
    if line.startswith("#PBS ") and " -vm" in line:
        fail(1, "sbatch: error: Invalid argument: ram\n")
for word in argv:
    if word.startswith("--comment="):
        comment = word.partition("=")[2]
if len(os.fsencode(comment)) > 1024:
    fail(1, "sbatch: error: Batch job submission failed: Pathname of a file, directory or other "
         "parameter too long\n")
number = len(list(top.glob("*.script"))) + 1
job = {"id": str(number), "argv": argv, "environ": dict(os.environ), "comment": comment}
(top / f"{number}.script").write_bytes(body)
(top / f"{number}.job").write_text(json.dumps(job))
(top / "last").write_text(str(number))
answer = top / "answer"
if answer.exists():
    code, out, err = json.loads(answer.read_text())
    answer.unlink()
    os.write(1, out.encode("latin-1")); os.write(2, err.encode("latin-1")); sys.exit(code)
print("Submitted batch job", number)
"""

SQUEUE = r"""
import json, sys
from pathlib import Path
top = Path(TOP)
if (top / "down").exists():
    sys.stderr.write("slurm_load_jobs error: Unable to contact slurm controller\n"); sys.exit(1)
asked = [word.partition("=")[2] for word in sys.argv if word.startswith(("--format", "--Format"))]
if asked == ["admin_comment:2000"]:
    facts = top / "facts"
    note = json.loads(facts.read_text()).get("note") if facts.exists() else ""
    print((note or "(null)").ljust(2000))
    sys.exit()
facts = top / "facts"
state = json.loads(facts.read_text()).get("state", "RUNNING") if facts.exists() else "RUNNING"
for path in top.glob("*.job"):
    for number in (path.stem, str(int(path.stem) + 100000)):
        name = top / "name"
        fields = {"%A": number, "%i": number, "%u": "ada", "%t": "R", "%T": state, "%M": "1:00",
                  "%N": "n[1-2]", "%r": "None",
                  "%j": name.read_text() if name.exists() else "t"}
        line = asked[0]
        for key, text in fields.items():
            line = line.replace(key, text)
        print(line)
"""

RECORD = """JobId={id} JobName={name}
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   Priority=4294901757 Nice=0 Account={account} QOS={qos}
   JobState={state} Reason=Prolog Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   Partition=main AllocNode:Sid=head:0
   ReqNodeList=(null) ExcNodeList={excluded}
   NodeList=n[1-2]
   NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   JOB_GRES=(null)
     Nodes=n[1-2] CPU_IDs={cpus} Mem={mem} GRES=
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   OverSubscribe={share} Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/ada/q.sh
   WorkDir=/home/ada
   AdminComment={note}~
   Comment={comment}~
   Power=
   ~

""".replace("~", " ")  # lines that scontrol ends with a blank

NODE = """NodeName=n1 Arch=x86_64 CoresPerSocket=1~
   AvailableFeatures={available}
   ActiveFeatures={active}
   Gres=(null)
   RealMemory={memory} AllocMem=0 FreeMem=900 Sockets=2 Boards=1
{reserve}   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
{comment}
""".replace("~", " ")

SCONTROL = r"""
import json, sys
from pathlib import Path
top = Path(TOP)
def fail(text):
    sys.stderr.write(text + "\n"); sys.exit(1)
if (top / "down").exists():
    fail("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
argv = sys.argv[1:]
with (top / "calls").open("a") as calls:
    calls.write(json.dumps(argv) + "\n")
facts_path, node_path = top / "facts", top / "node"
facts = {"name": "t", "state": "RUNNING", "restarts": 0, "excluded": "(null)", "cpus": "0",
         "mem": 512, "share": "OK", "note": "", "comment": "", "account": "(null)",
         "qos": "(null)"}
if facts_path.exists(): facts |= json.loads(facts_path.read_text())
node = {"available": "(null)", "active": "(null)", "comment": "", "memory": 4000, "reserve": "",
        "state": "IDLE"}
if node_path.exists(): node |= json.loads(node_path.read_text())
if argv[:2] == ["show", "job"]:
    number, _, offset = argv[-1].partition("+")
    parts = facts.get("components", 0)  # of a heterogeneous job; ID+N shows one of them
    if not parts:
        sys.stdout.write(RECORD.format(**facts, id=number))
    for n in range(parts):
        if offset in ("", str(n)):
            which = f"{int(number) + n} HetJobId={number} HetJobOffset={n}"
            text = RECORD.format(**facts, id=which)
            ids = f"   HetJobIdSet={number}-{int(number) + parts - 1}\n   UserId="
            text = text.replace("   UserId=", ids, 1)
            sys.stdout.write(text.replace("n[1-2]", f"n[{2 * n + 1}-{2 * n + 2}]"))
elif argv[:2] == ["show", "node"]:
    shown = "   Comment=" + node["comment"] if node["comment"] else ""
    sys.stdout.write(NODE.format(**node | {"comment": shown}))
elif argv[:2] == ["show", "aliases"]:
    print("n1")
elif argv[:2] == ["write", "batch_script"]:
    number = int(argv[2]) % 100000
    sys.stdout.buffer.write((top / f"{number}.script").read_bytes())
elif argv[0] in ("requeue", "requeuehold"):
    if facts.get("refuse"): fail("Requested operation is presently disabled for job 1")
    facts["restarts"] += 1
    facts["state"] = "COMPLETING"
elif argv[0] == "update":
    for word in argv[1:]:
        key, _, value = word.partition("=")
        if key == "ExcNodeList": facts["excluded"] = value
        elif key == "AdminComment": facts["note"] = value
        elif key == "Comment": node["comment"] = value
        elif key == "State": node["state"] = "MIXED" + {"DRAIN": "+DRAIN", "UNDRAIN": ""}[value]
        elif key == "Reason": node["reason"] = value
        elif key == "AvailableFeatures": node["available"] = value or "(null)"
        elif key == "ActiveFeatures": node["active"] = value or "(null)"
        elif key not in ("JobId", "NodeName"):
            fail("Update of this parameter is not supported: " + word)
else:
    fail("invalid keyword: " + argv[0])
facts_path.write_text(json.dumps(facts)); node_path.write_text(json.dumps(node))
"""

SINFO = r"""
import json, sys
from pathlib import Path
path = Path(TOP) / "node"
if sys.argv[1:] == ["-haN", "--format=%N|%b"]:
    for name, features in json.loads(path.read_text()).get("features", {}).items():
        print(name + "|" + features)
    sys.exit()
assert sys.argv[1:] == ["-haN", "--states=drain", "--format=%N|%E"], sys.argv
if (Path(TOP) / "down").exists():
    sys.stderr.write("slurm_load_partitions: Unable to contact slurm controller\n"); sys.exit(1)
node = json.loads(path.read_text()) if path.exists() else {}
if "DRAIN" in node.get("state", ""):
    print("n1|" + node.get("reason", "Not responding"))
for name, reason in node.get("others", {}).items():
    print(name + "|" + reason + "\n" + name + "|" + reason)
"""


class SlurmDoubles:
    """A directory with the doubles, and their data."""

    def __init__(self, root: Path) -> None:
        self.top = root / "slurm"
        self.bin = root / "bin"
        self.top.mkdir(parents=True)
        self.bin.mkdir()
        programs = {"sbatch": SBATCH, "salloc": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL}
        programs["sinfo"] = SINFO
        for name, program in programs.items():
            text = program.replace("TOP", repr(str(self.top)))
            text = text.replace("RECORD.", f"{RECORD!r}.").replace("NODE.", f"{NODE!r}.")
            (self.bin / name).write_text(shebang("json", "pathlib") + text)
            (self.bin / name).chmod(0o755)
        for name in ("srun", "scancel"):
            (self.bin / name).write_text("#!/bin/sh\n")
            (self.bin / name).chmod(0o755)

    def facts(self, **facts) -> dict:
        """Set scontrol's fields of every job; return all of them."""
        return self._update("facts", facts)

    def node(self, **facts) -> dict:
        """Set scontrol's fields of the node; return all of them."""
        return self._update("node", facts)

    def calls(self) -> list[list[str]]:
        """Return scontrol's calls since the last time."""
        path = self.top / "calls"
        if not path.exists():
            return []
        found = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return found

    def last(self) -> dict | None:
        """Return the job that was submitted since the last call, with its script."""
        path = self.top / "last"
        if not path.exists():
            return None
        number = path.read_text()
        path.unlink()
        job = json.loads((self.top / f"{number}.job").read_text())
        return job | {"script": (self.top / f"{number}.script").read_bytes()}

    def down(self, is_down: bool) -> None:
        """Let the controller answer or not."""
        path = self.top / "down"
        if is_down:
            path.touch()
        elif path.exists():
            path.unlink()

    def _update(self, name, facts) -> dict:
        path = self.top / name
        known = json.loads(path.read_text()) if path.exists() else {}
        if facts:
            path.write_text(json.dumps(known | facts))
        return known | facts
