#!/bin/sh
# Finishes the root directory of an image, in the sandbox: adds the recipe's files, runs its
# commands in there, packs it. Arguments: directory, the tar file of files, the script of commands
# (or ""), the tar file to write, the release of the kernel whose modules are in modules.tar (or "").
set -eu
root=$1 added=$2 commands=$3 packed=$4 release=$5
if [ -n "$release" ]; then
    # With the image's own tool: it knows its release, and the machine may not have one.
    tar -C "$root" --no-same-owner --keep-directory-symlink -xpf "${added%/*}/modules.tar"
    chroot "$root" depmod "$release"
fi
tar -C "$root" --numeric-owner --keep-directory-symlink -xpf "$added"
if [ -n "$commands" ]; then
    mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/etc"
    mount --rbind /proc "$root/proc"
    for device in null zero full random urandom tty; do
        : >"$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    names=
    if [ ! -h "$root/etc/resolv.conf" ] && [ -e /etc/resolv.conf ]; then
        [ -e "$root/etc/resolv.conf" ] || : >"$root/etc/resolv.conf"
        names=$root/etc/resolv.conf
        mount --bind /etc/resolv.conf "$names"
    fi
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp \
        DEBIAN_FRONTEND=noninteractive chroot "$root" /bin/sh -eu <"$commands" >&2
    [ -z "$names" ] || umount "$names"
    for device in null zero full random urandom tty; do umount "$root/dev/$device"; done
    umount -R -l "$root/proc"
fi
tar -C "$root" --numeric-owner --one-file-system --format=pax --xattrs --xattrs-include='*' \
    --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -cf "$packed" .
