"""Slurm's CPU ids and the kernel's."""

from vtorque_slurm import cpus


def test_cpu_ids_follow_the_sockets(tmp_path):
    """The kernel numbers hyper-threads after all cores, Slurm beside their core."""
    for number, (socket, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2):
        topology = tmp_path / f"cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "core_id").write_text(f"{core}\n")
    assert cpus.kernel_ids((0, 1), tmp_path) == (0, 4)
    assert cpus.kernel_ids((4, 5, 6, 7), tmp_path) == (2, 3, 6, 7)
    assert cpus.kernel_ids((8,), tmp_path) == ()
    assert cpus.kernel_ids((), tmp_path) == ()
    assert cpus.kernel_ids((0,), tmp_path / "none") == ()
