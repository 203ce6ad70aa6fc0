# A person's own jobs at login: only where a person reads it, and never for longer than half a second.
if [ -n "${PS1-}" ] && [ -t 1 ] && [ ! -e "$HOME/.hushlogin" ] && [ ! -e /run/minivm/slurm-away ] && [ "$(id -u)" != 0 ]; then
    minivm_jobs=$(timeout 0.5 /usr/bin/squeue --me -h -o '  %.12i %.24j %.10T %.11M %R' 2>/dev/null) || minivm_jobs=
    [ -z "$minivm_jobs" ] || printf 'Your jobs (minivm job ID says why):\n%s\n\n' "$minivm_jobs"
    unset minivm_jobs
fi
