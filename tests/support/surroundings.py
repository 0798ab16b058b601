"""Compare the environment of a job's script on the node and in a guest."""

import re
from collections import Counter

SCRIPT = r"""#!/bin/bash
trap 'echo "signal USR1"' USR1
kill -USR1 $$
env -0 | while IFS= read -rd '' v; do echo "env $(printf %s "$v" | tr '\n' ' ')"; done
echo "nproc $(nproc)"
ulimit -Sa | sed 's/^/soft /'
umask | sed 's/^/umask /'
pwd | sed 's/^/cwd /'
for fd in /proc/$$/fd/*; do
  n=${fd##*/}
  [ "$n" = 255 ] || echo "fd $n"
done
read -r line; echo "stdin $? [$line]"
echo "words $# $1|$2 ${0##*/} $-"
[ -n "$END" ] || exit 7
kill -s "$END" $$
"""

# Additional variables of a guest's job, by its plugins (doc/guests.md), by their beginning.
OURS = re.compile(r"(VTORQUE_|OMPI_MCA_|PRTE_MCA_|HYDRA_|I_MPI_|PMIX_MCA_|DISTRO$)")
# The host's own, the submitting login's (HOST_ONLY), and names of the job's own files.
HOSTS = re.compile(
    r"(DBUS_|DISPLAY$|HOSTNAME$|JOURNAL_|LISTEN_|NOTIFY_|OLDPWD$|SHLVL$|SSH_|TMPDIR$|WAYLAND_|"
    r"XAUTHORITY$|XDG_|INVOCATION_ID$|_$)"
)
# The guest's RAM and kernel set these (doc/user.md).
LIMITS = re.compile(r"(data seg|pending signals|max user processes|open files|max locked|stack)")


def differences(plain, guest, *, per_job, other=()):
    """Return undocumented differences: lines of the plain job's, of the guest's.

    ``per_job``: variables that name the job or its place; ``other``: beginnings of other lines.
    """
    both = []
    for text in (plain, guest):
        lines = text.decode("utf-8", "replace").splitlines()
        both.append(Counter(line for line in lines if not _may_differ(line, per_job, other)))
    only = [sorted((one - two).elements()) for one, two in (both, both[::-1])]
    return only[0], only[1]


def _may_differ(line, per_job, other):
    kind, _, rest = line.partition(" ")
    if kind == "env":
        name = rest.partition("=")[0]
        return bool(OURS.match(name) or HOSTS.match(name)) or name in per_job
    return (kind == "soft" and bool(LIMITS.match(rest))) or line.startswith(tuple(other))
