#!/bin/sh
# Computes, or writes small files where it was submitted; each prints a result that is the same everywhere.
# busybox, since a micro guest has the same one as its node.
case $WORK in
  compute)
    busybox awk 'BEGIN { x = 1; for (i = 0; i < 2000000; i++) x = x * 16807 % 2147483647; print "result", x % 1000 }' ;;
  files)
    busybox awk 'BEGIN { for (i = 0; i < 1000; i++) { name = "part." i; print i > name; close(name) } }'
    set -- part.*
    echo "result $#"
    rm "$@" ;;
esac
