# Slurm's commands for people: times as "3 minutes ago" where a terminal reads them, and no output cut to 8 characters.
if [ -t 1 ] && [ -n "${PS1-}" ]; then
    export SLURM_TIME_FORMAT="${SLURM_TIME_FORMAT-relative}"
    export SQUEUE_FORMAT="${SQUEUE_FORMAT-%.12i %.12P %.24j %.12u %.10T %.11M %.11l %.5D %R}"
fi
