#!/bin/bash
# Into each container: its job's own directory, what the task prolog says, and of the GPU's driver what the pod's runtime
# handed in.
set -euo pipefail

prolog=/usr/libexec/minivm/task_prolog
job=/var/tmp/minivm/jobs/${SLURM_JOB_ID:-none}
if [[ -d $job ]]; then
    echo "$job $job none x-create=dir,bind,rw,nosuid,nodev" >> "$ENROOT_MOUNTS"
    # As the task prolog left it before there was a container.
    said=$job/enroot/task_prolog.${SLURM_STEP_ID:-none}
    echo "$said $prolog none x-create=file,bind,ro,nosuid,nodev" >> "$ENROOT_MOUNTS"
fi

[[ -e /dev/nvidiactl ]] || exit 0
driver=/usr/local/nvidia
library='/lib(cuda|cudadebugger|nvidia-[a-z0-9-]+|nvcuvid|nvoptix)\.so\.[0-9][0-9.]*$'
program='/bin/nvidia-[a-z0-9-]+$'
while read -r point; do
    name=${point##*/}
    if [[ $point =~ $library ]]; then
        # libcuda.so.580.65.06 is asked for as libcuda.so.1.
        places=("lib64/$name" "lib64/${name%%.so.*}.so.1")
    elif [[ $point =~ $program ]]; then
        places=("bin/$name")
    else
        continue
    fi
    for place in "${places[@]}"; do
        echo "$point $driver/$place none x-create=file,bind,ro,nosuid,nodev" >> "$ENROOT_MOUNTS"
    done
done < <(cut -d ' ' -f 5 /proc/self/mountinfo | sort -u)
of_image() { sed -n "s/^$1=//p" "$ENROOT_ENVIRON" | tail -n 1; }
path=$(of_image PATH) libraries=$(of_image LD_LIBRARY_PATH)
{
    echo "PATH=${path:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}:$driver/bin"
    echo "LD_LIBRARY_PATH=${libraries:+$libraries:}$driver/lib64"
} >> "$ENROOT_ENVIRON"
