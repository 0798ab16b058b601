#!/bin/sh
# What busybox's udhcpc calls (busybox, examples/udhcp/simple.script): applies a lease.
# The values come from the network's DHCP server: used as words, never as code.
set -u
case $1 in
deconfig) exec ip link set dev "$interface" up ;;
bound | renew) ;;
*) exit 0 ;;
esac
ip addr flush dev "$interface"
ip addr add "$ip/${mask:-24}" dev "$interface" || exit
[ -z "${VTORQUE_ADDRESS_ONLY:-}" ] || exit 0
for hop in ${router:-}; do
    ip route add default via "$hop" dev "$interface"
    break
done
for server in ${dns:-}; do
    printf 'nameserver %s\n' "$server"
done >/etc/resolv.conf
