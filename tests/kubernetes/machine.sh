#!/bin/bash
# machine.sh NAME STATE VOLUMES: PID 1 of one machine of the lab, with mounts, processes and a host name of its own.
# When it dies the kernel ends all that ran on the machine at once, as a power cut does, and its mounts with it.
name=$1 state=$2 volumes=$3
# /proc is still the outer one: our number as the outside sees it.
read -r number _ < /proc/self/stat
set -e
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
# A boot has a name of its own; containers are shown the same (configs.py).
cat /proc/sys/kernel/random/uuid > "$state/boot_id"
mount --bind "$state/boot_id" /proc/sys/kernel/random/boot_id
for place in /run/netns /run/containerd /var/lib/cni /var/log/containers; do mount -t tmpfs -o mode=755 lab "$place"; done
mount --bind "$state/kubelet" /var/lib/kubelet
mount --bind "$state/log" /var/log/pods
mount --bind "$volumes" /tmp/hostpath_pv
# A kubelet insists on these and would set them for the whole host: it is shown what it wants to see.
mkdir -p "$state/sysctl"
for setting in vm/overcommit_memory:1 vm/panic_on_oom:0 kernel/panic:10 kernel/panic_on_oops:1 \
    kernel/keys/root_maxkeys:1000000 kernel/keys/root_maxbytes:25000000; do
    shown=$state/sysctl/${setting//[\/:]/_}
    echo "${setting#*:}" > "$shown"
    mount --bind "$shown" "/proc/sys/${setting%%:*}"
done
mount --make-rshared /
echo "$number" > "$state/pid.new"
mv "$state/pid.new" "$state/pid"
trap : TERM INT
while :; do
    sleep 100000 &
    wait $!
done
