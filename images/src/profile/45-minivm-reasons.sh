# `sinfo -R` cuts a node's reason to 20 characters; at a terminal it comes last, and whole.
if [ -n "${PS1-}" ]; then
    sinfo() {
        case " $* " in
            *' -R '* | *' --list-reasons '*) minivm_shown sinfo -o '%12u %19H %N  %E' "$@" ;;
            *) minivm_shown sinfo "$@" ;;
        esac
    }
fi
