# Whoever reached his share of this machine is told so at the next prompt: the kernel's own words ("Killed", "Resource
# temporarily unavailable") do not tell whose limit it was. Only what bash can do itself: it may have no process left.
if [ -n "${BASH_VERSION-}" ] && [ -n "${PS1-}" ] && [ -s /run/minivm/user-limits.prompt ]; then
    minivm_counts=()
    minivm_limits() {
        local status=$? directory file key said name count row=0
        while read -r directory file key said; do
            [ -r "$directory/$UID/$file" ] && while read -r name count; do
                [ "$name" = "$key" ] || continue
                [ "$count" = "${minivm_counts[row]-$count}" ] || printf 'minivm: %s\n' "$said" >&2
                minivm_counts[row]=$count
            done < "$directory/$UID/$file"
            row=$((row + 1))
        done < /run/minivm/user-limits.prompt
        return "$status"
    }
    PROMPT_COMMAND+=(minivm_limits)
fi
