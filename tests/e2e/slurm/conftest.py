"""The cluster for every test here."""

import shutil
import subprocess

import pytest

import client_tools
import slurm_cluster

CONFIG = "/etc/vtorque/vtorque.toml"
DATABASE = """
rm -rf /var/lib/mysql
mkdir -p /var/lib/mysql /run/mysqld
chown mysql: /var/lib/mysql /run/mysqld
mariadb-install-db --user=mysql --datadir=/var/lib/mysql --skip-test-db >/var/log/mariadb.log 2>&1
setsid tini -s -- mariadbd --user=mysql --skip-networking --socket=/run/mysqld/mysqld.sock \
  >>/var/log/mariadb.log 2>&1 </dev/null &
until mariadb -e 'create database slurm_acct_db' 2>/dev/null; do sleep 0.1; done
cat > /etc/slurm/slurmdbd.conf <<CONF
AuthType=auth/munge
DbdHost=head
SlurmUser=root
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=/var/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
CONF
chmod 600 /etc/slurm/slurmdbd.conf
slurmdbd
until grep -q 'slurmdbd version .* started' /var/log/slurmdbd.log; do sleep 0.1; done
"""
RESTART = """
kill $(cat /run/slurmctld.pid)
while pgrep -x slurmctld >/dev/null; do sleep 0.1; done
slurmctld
until sinfo >/dev/null 2>&1; do sleep 0.1; done
"""
STOP = """
for name in slurmdbd mariadbd; do
  pkill -x $name
  while pgrep -x $name >/dev/null; do sleep 0.1; done
done
"""
ADDED = "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=head\n"
SLURM_CONF = "/etc/slurm/slurm.conf"
# As the config of scripts/cluster, but behind NAT, which own images need.
NAT_NETWORK = b"""
<network><name>own</name><forward mode='nat'/><bridge name='own0' stp='off' delay='0'/>
<dns enable='no'/><ip address='10.91.0.1' netmask='255.255.0.0'/></network>
"""
BEHIND_NAT = 's|kind = "bridge"|kind = "network"|; s|source = "br0"|source = "own"|; s|10.89|10.91|'
OWN_IMAGES = """
[plugin.own-images]
allow = true
allow_root = true
opt_in_unconfined_qemu = true
"""
TABLE = b'\n[plugin.archive]\ndirectory = "{home}/.vtorque/jobs"\n'


@pytest.fixture(scope="session")
def cluster():
    """Return the cluster, made if it is not up."""
    return slurm_cluster.bring_up()


@pytest.fixture
def clean(cluster):
    """Fail the test if a job leaves anything on the cluster; replaces the single node's."""
    with slurm_cluster.nothing_left(cluster):
        yield cluster


@pytest.fixture(scope="module")
def slurmdbd(cluster):
    """Return the cluster with accounting for the tests of a module."""
    machines = slurm_cluster.MACHINES
    cluster.root("head", "timeout", "100", "sh", "-ec", DATABASE)
    for machine in machines:
        cluster.root(machine, "cp", SLURM_CONF, f"{SLURM_CONF}.before")
        cluster.root(machine, "sh", "-c", f"cat >> {SLURM_CONF}", stdin=ADDED.encode())
    cluster.root("head", "timeout", "100", "sh", "-ec", RESTART)
    known = ("sacctmgr", "--parsable2", "--noheader", "show", "cluster", "format=ControlHost")
    cluster.wait(lambda: cluster.root("head", *known).strip(), what="the cluster is registered")
    yield cluster
    for machine in machines:
        cluster.root(machine, "mv", f"{SLURM_CONF}.before", SLURM_CONF)
    cluster.root("head", "timeout", "100", "sh", "-ec", RESTART)
    cluster.root("head", "timeout", "100", "sh", "-ec", STOP)


@pytest.fixture
def archive(clean):
    """Enable the plugin on all machines for one test; return the user's directory."""
    machines = ("head", *slurm_cluster.NODES)
    for machine in machines:
        clean.root(machine, "cp", CONFIG, f"{CONFIG}.before")
        clean.root(machine, "tee", "-a", CONFIG, stdin=TABLE)
    directory = clean.home / ".vtorque" / "jobs"
    yield directory
    for machine in machines:
        clean.root(machine, "mv", f"{CONFIG}.before", CONFIG)
    clean.user("rm", "-rf", ".vtorque")


@pytest.fixture(scope="module")
def own_images(cluster):
    """Let the site accept own images, although this kernel has no AppArmor; return the cluster."""
    for machine in slurm_cluster.MACHINES:
        cluster.root(machine, "cp", CONFIG, f"{CONFIG}.before")
        cluster.root(machine, "sed", "-i", BEHIND_NAT, CONFIG)
        cluster.root(machine, "sh", "-c", f"cat >> {CONFIG}", stdin=OWN_IMAGES.encode())
    for node in slurm_cluster.NODES:
        cluster.root(node, "virsh", "-q", "net-create", "/dev/stdin", stdin=NAT_NETWORK)
    yield cluster
    for node in slurm_cluster.NODES:
        cluster.root(node, "virsh", "-q", "net-destroy", "own")
    for machine in slurm_cluster.MACHINES:
        cluster.root(machine, "mv", f"{CONFIG}.before", CONFIG)


@pytest.fixture(scope="module")
def clients(slurmdbd, request):
    """Install the tools; return a function that runs a command with them on the submit host."""
    cluster = slurmdbd
    in_full = any(item.get_closest_marker("full") for item in request.session.items)
    kept = client_tools.install("" if in_full else client_tools.QUICK)
    subprocess.run(["cp", "-a", kept, cluster.home / "clients"], check=True)
    programs = [each for each in (cluster.home / "clients/bin").iterdir() if each.is_file()]
    first_line = f"1s|^#!.*/python.*|#!{client_tools.PYTHON}|"
    subprocess.run(["sed", "-i", first_line, *programs], check=True)
    client_tools.copy_python(cluster.home / "python")
    own = [f"{client_tools.HOME}/{each}/bin" for each in ("python", "clients")]
    path = ":".join([*own, slurm_cluster.PREFIX, "/usr/local/bin:/usr/bin:/bin"])
    env = {"PYTHONPATH": f"{client_tools.HOME}/clients", "PATH": path}

    def run(*argv, check=True, timeout=1200):
        return cluster.user(*argv, env=env.items(), machine="login", check=check, timeout=timeout)

    yield run
    cluster.user(
        "sh", "-c", "rm -rf .psij .cache .parsl .dask .config .reframe .snakemake .jupyter .local"
    )
    for name in ("clients", "python"):
        shutil.rmtree(cluster.home / name)
