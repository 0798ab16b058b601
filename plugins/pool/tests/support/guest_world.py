"""The world of slurm_world with a separate libvirtd, whose guests are the nodes. As root.

They come from ``images``, a vTorque pool with the image slurm-worker (doc/recipes).
"""

from slurm_world import _CONF, _TOML, SlurmWorld

# The head is 10.90.0.1 for them: libvirt's network is a bridge of these namespaces.
_LIBVIRT = r"""
umount -lR /sys/fs/cgroup || :
mount -t sysfs sysfs /sys
for each in etc var/lib var/cache var/log; do
  mkdir -p /$each/libvirt; mount -t tmpfs -o mode=755 tmpfs /$each/libvirt
done
install -d -m 750 -o libvirt-qemu -g libvirt-qemu /var/lib/libvirt/qemu
mkdir /run/images /run/machines
mount --bind $0/images /run/images
virtlogd -d
setsid tini -s -- libvirtd > $0/libvirtd.log 2>&1 &
until virsh -q list > /dev/null 2>&1; do kill -0 $!; sleep 0.2; done
virsh -q net-create /dev/stdin <<END
<network><name>default</name><bridge name='virbr0'/><forward mode='open'/>
<ip address='10.90.0.1' netmask='255.255.255.0'><dhcp><range start='10.90.0.100' end='10.90.0.200'/>
</dhcp></ip></network>
END
"""
_CLOUD = """driver = "libvirt"
accel = "qemu"
pool = "/run/images"
images = "/run/machines"
secrets = "{top}/secrets"
"""
_SECRETS = """#cloud-config
write_files:
- path: /etc/munge/munge.key
  owner: munge:munge
  permissions: "0400"
  content: {key}
- path: /etc/default/slurmd
  content: SLURMD_OPTIONS="-b --conf-server 10.90.0.1"
"""


class GuestWorld(SlurmWorld):
    """See :class:`SlurmWorld`; ``machines`` are libvirt's domains, ``top``/images has to exist."""

    conf = (
        _CONF.replace("SlurmdParameters=config_overrides\n", "")
        .replace("{top}/cloud/spool/%n", "/var/spool/slurmd")
        .replace("{top}/slurmd.%n.log", "/var/log/slurm/slurmd.log")
        .replace("10.89.0.1", "10.90.0.1")
        + "SlurmctldParameters=enable_configless,cloud_reg_addrs,idle_on_node_suspend\n"
    )
    toml = (
        _TOML.replace("idle = 4", "idle = 10")
        .replace("ending = 4", "ending = 60")
        .replace("timeout = 20", "timeout = 60")
        .replace('memory = "500M"', 'memory = "500M"\nimage = "slurm-worker"')
        + _CLOUD
    )
    inside = _LIBVIRT

    def __init__(self, top, most=3, ready=900):
        super().__init__(top, most, ready)
        path = top / "secrets"
        path.touch(mode=0o600)
        path.write_text(_SECRETS.format(key=(top / "munge.key").read_text()))

    def _nodes_of_one_host(self):
        """Each node has its own host."""

    def machines(self):
        """Return the names of the domains."""
        return self.run("virsh", "-q", "list", "--name").split()
