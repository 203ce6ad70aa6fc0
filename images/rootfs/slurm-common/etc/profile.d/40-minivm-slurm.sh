# Slurm's commands for people: times as people say them, and no name cut to 8 characters. Only what somebody types and a
# terminal shows: exported variables would go with each job that is submitted here, and into files and pipes, where
# programs read Slurm's own format and whole dates.
if [ -n "${PS1-}" ]; then
    minivm_shown() {
        [ -t 1 ] || { command "$@"; return; }
        SLURM_TIME_FORMAT="${SLURM_TIME_FORMAT-relative}" \
            SQUEUE_FORMAT="${SQUEUE_FORMAT-%.12i %.12P %.24j %.12u %.10T %.11M %.11l %.5D %R}" command "$@"
    }
    squeue() { minivm_shown squeue "$@"; }
    sacct() { minivm_shown sacct "$@"; }
    scontrol() { minivm_shown scontrol "$@"; }
    sinfo() { minivm_shown sinfo "$@"; }
fi
