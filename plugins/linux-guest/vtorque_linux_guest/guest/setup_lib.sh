# The functions of every guest's setup.sh: POSIX sh, and no more than busybox has.
# The agent runs the script as root; it reads steps on fd 3 and shows the output of a failed one.
# Before this text R is set: a prefix of all paths, empty in a guest.

set -eu
umask 022
export LC_ALL=C
D=$R/run/vtorque
LOG=$D/setup.log
NL='
'
exec 4>&1

# What was said in the step that failed is all that the agent gets to show.
ended() {
    code=$?
    trap - EXIT
    if [ "$code" -ne 0 ]; then
        exec >&4
        if [ -s "$LOG" ]; then tail -c 1800 "$LOG"; else echo "exit code $code"; fi
    fi
    exit "$code"
}
trap ended EXIT

step() {
    printf 'STEP %s\n' "$1" >&3
    exec >"$LOG" 2>&1
}

fail() {
    printf '%s\n' "$1"
    exit 1
}

# A command as given, apart from the agent's pipes: a daemon that it starts must not hold them.
run() {
    "$@" </dev/null 3>&- 4>&- || fail "$1: exit code $?"
}

folder() {
    if [ ! -d "$1" ]; then mkdir -p "$1"; fi
}

# Fails if a part of a path is a link: a stranger's image may lead the user's files to root's place.
own_path() {
    part=$R
    rest=${1#"$R"/}/
    while [ -n "$rest" ]; do
        part=$part/${rest%%/*}
        rest=${rest#*/}
        if [ -h "$part" ]; then fail "$part is a link in the image: $1 cannot be used"; fi
    done
}

# target, path of the link: create the link, unless the image has a file at its path.
link() {
    if [ ! -e "$2" ] && [ ! -h "$2" ]; then ln -s "$1" "$2"; fi
}

# number on the seed, path, mode, owner. Few processes: each costs 10 ms in an emulated guest.
put() {
    folder "${2%/*}"
    if [ -e "$2" ] || [ -h "$2" ]; then rm -f "$2"; fi
    if [ "$3" = 0644 ]; then
        cat "$D/files/$1" >"$2"
    else
        (umask 077 && cat "$D/files/$1" >"$2")
    fi
    if [ "$4" != 0:0 ]; then chown "$4" "$2"; fi
    if [ "$3" != 0644 ]; then chmod "$3" "$2"; fi
    label "$2"
}

# path, text: the same for a small file of root's, without a process.
text() {
    folder "${1%/*}"
    if [ -e "$1" ] || [ -h "$1" ]; then rm -f "$1"; fi
    printf %s "$2" >"$1"
    label "$1"
}

# SELinux types of what was written, where the guest has SELinux.
label() {
    if command -v restorecon >/dev/null; then restorecon -F "$1"; fi
}

# Puts lines of passwd(5), shadow(5) or group(5) first and drops older ones of the same name: the
# job's ids are the cluster's, whatever the image has. The file stays the same one (SELinux).
ids() {
    names=:
    kept=
    while IFS= read -r line; do
        names=$names${line%%:*}:
        kept=$kept$line$NL
    done <"$1"
    if [ -e "$2" ]; then
        while IFS= read -r line || [ -n "$line" ]; do
            case $names in
            *":${line%%:*}:"*) ;;
            *) kept=$kept$line$NL ;;
            esac
        done <"$2"
        printf %s "$kept" >"$2"
    else
        (umask "$3" && printf %s "$kept" >"$2")
    fi
}

# MAC; sets NIC
find_nic() {
    NIC=
    for at in "$R"/sys/class/net/*/address; do
        found=
        if [ -r "$at" ]; then read -r found <"$at" || :; fi
        if [ "$found" = "$1" ]; then
            NIC=${at%/address}
            NIC=${NIC##*/}
        fi
    done
    if [ -z "$NIC" ]; then fail "no network card has the address $1"; fi
}

# Until NIC has an address, and so a route to its network (proc(5), /proc/net/route). Whoever needs
# the network fails by itself where there is none after 15 s.
await_address() {
    tries=0
    while [ "$tries" -lt 75 ] && [ -r "$R/proc/net/route" ]; do
        while read -r name _; do
            if [ "$name" = "$NIC" ]; then return 0; fi
        done <"$R/proc/net/route"
        tries=$((tries + 1))
        sleep 0.2
    done
}

# disk serial; sets DISK
find_disk() {
    DISK=
    for at in "$R"/sys/block/*/serial; do
        found=
        if [ -r "$at" ]; then read -r found <"$at" || :; fi
        if [ "$found" = "$1" ]; then
            DISK=${at%/serial}
            DISK=$R/dev/${DISK##*/}
        fi
    done
    if [ -z "$DISK" ]; then fail "no disk has the serial $1"; fi
}

# offset, count: those bytes of DISK, with a dot for each that is not printable ASCII.
disk_text() {
    dd if="$DISK" bs=1 skip="$1" count="$2" 2>/dev/null | tr -c ' -~' .
}

# Prints which file system DISK has, if it is one that Linux often lacks; magic(5) has the offsets.
disk_file_system() {
    case $(disk_text 65600 8) in _BHRfS_M) echo btrfs ;; esac
    case $(disk_text 65588 6) in ReIsEr) echo ReiserFS ;; esac
    case $(disk_text 32769 5) in CD001 | BEA01 | NSR0[23]) echo 'ISO 9660 or UDF' ;; esac
    case $(disk_text 32768 4) in JFS1) echo JFS ;; esac
    case $(disk_text 0 4) in XFSB) echo XFS ;; hsqs) echo squashfs ;; esac
    case $(disk_text 3 8) in 'NTFS    ') echo NTFS ;; 'EXFAT   ') echo exFAT ;; esac
    case $(disk_text 54 5)$(disk_text 82 5) in FAT* | ?????FAT32) echo FAT ;; esac
}

# options, target. What DISK begins like says why it cannot be mounted.
mount_disk() {
    if said=$(mount -o "$1" "$DISK" "$2" 2>&1 </dev/null 3>&- 4>&-); then return; fi
    like=$(disk_file_system)
    if [ -n "$like" ]; then
        fail "the disk has a file system ($like) that this image cannot mount: $said; use ext4"
    fi
    begins=$(dd if="$DISK" bs=4096 count=1 2>/dev/null | tr -c ' -~' .)
    case $begins in
    KDMV* | COWD* | '# Disk DescriptorFile'*) like='a vmdk' ;;
    conectix*) like='a vhd' ;;
    vhdxfile*) like='a vhdx' ;;
    '<<< '*) like='a vdi' ;;
    QFI*) like='a qcow2, whose name must end in .qcow2' ;;
    'QED.'*) like='a qed' ;;
    'WithoutFreeSpac'* | 'WithouFreSpacExt'*) like='a Parallels disk' ;;
    LUKS*) like='an encrypted disk (LUKS)' ;;
    *SWAPSPACE2 | *SWAP-SPACE) like='swap space' ;;
    PK* | BZh* | '.7zXZ'* | 7z*) like='an archive or a compressed file' ;;
    *'EFI PART'*) like='a partition table' ;;
    *LABELONE*) like='a volume of LVM' ;;
    *)
        case $(disk_text 257 5) in ustar) like='an archive or a compressed file' ;; esac
        if [ "$(printf %.512s "$begins" | tail -c 2)" = U. ]; then like='a partition table'; fi
        ;;
    esac
    # Some file systems and RAID members begin with up to 64 KiB of zeros.
    if [ -n "$like" ]; then :
    elif [ "$(dd if="$DISK" bs=4096 count=32 2>/dev/null | tr -d '\000' | wc -c)" -ne 0 ]; then
        fail "the disk cannot be mounted: $said; check the file, as with e2fsck -f"
    else
        like='an empty disk: make a file system in it, as with mkfs.ext4'
    fi
    fail "no file system found; the file begins like $like"
}

# glob below /dev, which one (from 0), link, owner. Devices may still be on their way.
device() {
    tries=0
    while :; do
        found=$(nth_device "$1" "$2")
        if [ -n "$found" ]; then break; fi
        tries=$((tries + 1))
        if [ "$tries" -gt 50 ]; then fail "no device $2 (from 0) of /dev/$1 after 10 s"; fi
        sleep 0.2
    done
    folder "${3%/*}"
    ln -sfn "$found" "$3"
    chown "$4" "$found"
}

# Shorter names first: uverbs2 comes before uverbs10. IFS: the glob is not split into words.
nth_device() (
    IFS=
    for found in "$R/dev/"$1; do
        if [ -e "$found" ]; then printf '%s %s\n' "${#found}" "$found"; fi
    done | sort -k1,1n -k2 | sed -n "$(($2 + 1))s/^[0-9]* //p"
)

# vendor, device, region, which one (from 0), link, owner. The kernel's own file of the region (its
# PCI/sysfs-pci.rst): whoever may open that can mmap it. Enabled here: the device has no driver.
pci_memory() {
    left=$4
    for at in "$R"/sys/bus/pci/devices/*; do
        vendor=
        device=
        if [ -r "$at/device" ]; then
            read -r vendor <"$at/vendor" || :
            read -r device <"$at/device" || :
        fi
        if [ "$vendor $device" != "$1 $2" ]; then continue; fi
        left=$((left - 1))
        if [ "$left" -lt 0 ]; then break; fi
    done
    if [ "$left" -ge 0 ]; then fail "no PCI device ${1#0x}:${2#0x} number $4 (from 0)"; fi
    if [ ! -e "$at/resource$3" ]; then fail "PCI device ${at##*/} has no region $3"; fi
    echo 1 >"$at/enable"
    folder "${5%/*}"
    ln -sfn "$at/resource$3" "$5"
    chown "$6" "$at/resource$3"
}

packages_debian() {
    for name; do
        shift
        if ! dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q ' installed$'; then
            set -- "$@" "$name"
        fi
    done
    if [ $# -gt 0 ]; then
        export DEBIAN_FRONTEND=noninteractive
        run apt-get -q -o DPkg::Lock::Timeout=120 update
        # A name that there is not would be a pattern to apt-get, or with - or + at its end an order.
        for name; do
            if ! apt-cache pkgnames "${name%%:*}" | grep -Fqx -- "${name%%:*}"; then
                fail "there is no package $name"
            fi
        done
        run apt-get -q -y -o DPkg::Lock::Timeout=120 --no-install-recommends install "$@"
    fi
}

packages_redhat() {
    for name; do
        shift
        if ! rpm -q --quiet "$name"; then set -- "$@" "$name"; fi
    done
    if [ $# -gt 0 ]; then run dnf -q -y install "$@"; fi
}

updates_debian() {
    packages_debian unattended-upgrades
    run unattended-upgrade
}

updates_redhat() {
    run dnf -q -y upgrade --security
}

# sshd takes the first value that it finds for a keyword (sshd_config(5)), so ours go on top. Newer
# images include a directory there, into which cloud-init has put ours before sshd was started.
ssh_settings() {
    if [ ! -f "$R/etc/ssh/sshd_config" ]; then return 0; fi
    if grep -q '^Include /etc/ssh/sshd_config\.d/\*\.conf' "$R/etc/ssh/sshd_config"; then return 0; fi
    cat "$D/files/$1" "$R/etc/ssh/sshd_config" >"$D/sshd_config"
    cat "$D/sshd_config" >"$R/etc/ssh/sshd_config"
    if ! command -v systemctl >/dev/null; then return 0; fi
    for name in ssh sshd; do
        if systemctl cat "$name.service" >/dev/null 2>&1; then
            run systemctl try-restart "$name.service"
            return 0
        fi
    done
}

# Runs the admin's epilogue when the job's user asks for it, once; what it says and its exit code
# go back through the second pipe. The user's client is /usr/lib/vtorque/site-epilogue.
epilogue_waiter() {
    mkdir -p "$R/run/vtorque-epilogue"
    mkfifo -m 0620 "$R/run/vtorque-epilogue/ask"
    mkfifo -m 0640 "$R/run/vtorque-epilogue/answer"
    chown "0:$1" "$R/run/vtorque-epilogue/ask" "$R/run/vtorque-epilogue/answer"
    (
        read -r _ <"$R/run/vtorque-epilogue/ask" || :
        rm -f "$R/run/vtorque-epilogue/ask"
        exec >"$R/run/vtorque-epilogue/answer" 2>&1
        code=0
        for script in "$R"/usr/lib/vtorque/epilogue/*; do
            "$script" || code=$?
            if [ "$code" -ne 0 ]; then break; fi
        done
        printf '\n%s\n' "$code"
    ) </dev/null >/dev/null 2>&1 3>&- 4>&- &
}

# The agent of what the job's user has run when the job is cancelled.
cancel_agent() {
    "$R/usr/lib/vtorque/vtorque-agent" "$D/cancel.conf" </dev/null >/dev/null 2>&1 3>&- 4>&- &
}

# Holds what cloud-init has merged against its own schema. In our images, whose modules of this
# stage would come after READY, then has them run; elsewhere they have, or are at it.
cloud_config() {
    run cloud-init schema --config-file "$R/var/lib/cloud/instance/cloud-config.txt"
    if [ "$1" != modules ]; then return 0; fi
    for mode in config final; do
        if cloud-init modules --mode="$mode" </dev/null 3>&- 4>&-; then continue; fi
        grep '\[WARNING\]\|\[ERROR\]' "$R/var/log/cloud-init.log" | tail -n 5 || :
        fail "a module of cloud-init's stage $mode has failed"
    done
}
