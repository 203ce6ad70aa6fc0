# Where a person's tmux or screen still runs: a login pod that is being replaced writes its end and address into his
# home, with his rights. Only he can write there, and nothing of it is run.
if [ -n "${PS1-}" ] && [ -t 1 ] && [ -d "$HOME/.minivm/login-pods" ]; then
    for minivm_file in "$HOME"/.minivm/login-pods/*; do
        [ -f "$minivm_file" ] && [ -r "$minivm_file" ] || continue
        minivm_pod=${minivm_file##*/} minivm_end='' minivm_address=''
        read -r minivm_end minivm_address < "$minivm_file" || continue
        case $minivm_pod in *[!a-z0-9.-]*) continue ;; esac
        case $minivm_address in '' | *[!0-9a-f.:]*) continue ;; esac
        case $minivm_end in [0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]) ;; *) continue ;; esac
        if [ "$minivm_end" -le "$(date +%s)" ]; then
            rm -f "$minivm_file"
        else
            case " $(hostname -I) " in *" $minivm_address "*) continue ;; esac
            printf 'Your tmux or screen runs on the login pod %s until %s. Go there:\n  ssh -o HostKeyAlias=%s %s\n\n' \
                "$minivm_pod" "$(date -d "@$minivm_end" '+%a %H:%M %Z')" "$minivm_pod" "$minivm_address"
        fi
    done
    unset minivm_file minivm_pod minivm_end minivm_address
fi
