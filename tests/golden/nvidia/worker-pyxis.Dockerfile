# worker-pyxis: Containers in jobs, by enroot and pyxis - what srun --container-image starts
FROM layer:worker
ADD layer.tar /
ARG MINIVM_SOURCES=""
ARG MINIVM_CA=""
RUN set -eu; umask 022; export SOURCE_DATE_EPOCH=1793491200 DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8; \
    begin=$(mktemp); now=$(date +%s); options="-o Dpkg::Use-Pty=0 -o Acquire::Retries=3 -o Acquire::Languages=none"; \
    if [ -n "$MINIVM_SOURCES" ]; then printf '%b' "$MINIVM_SOURCES" > "$begin.list"; chmod 644 "$begin.list"; \
        options="$options -o Dir::Etc::SourceList=$begin.list -o Dir::Etc::SourceParts=/dev/null"; fi; \
    if [ -n "$MINIVM_CA" ]; then printf '%b' "$MINIVM_CA" > "$begin.pem"; chmod 644 "$begin.pem"; \
        options="$options -o Acquire::https::CaInfo=$begin.pem"; export SSL_CERT_FILE="$begin.pem"; fi; \
    chmod u-s /usr/bin/mount /usr/bin/umount; \
    mkdir -p /usr/libexec/minivm/stepd; \
    { if [ -L /usr/sbin/slurmstepd ]; then ln -s "$(readlink -f /usr/sbin/slurmstepd)" /usr/libexec/minivm/stepd/slurmstepd; else mv /usr/sbin/slurmstepd /usr/libexec/minivm/stepd/slurmstepd; fi; } || exit 1; \
    ln -sf /usr/libexec/minivm/slurmstepd /usr/sbin/slurmstepd; \
    echo "minivm: clean up"; \
    find /var/lib/apt/lists /var/cache/apt -type f ! -name lock -delete; \
    rm -rf /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/cache/man/* \
        /var/cache/ldconfig/aux-cache /var/lib/systemd/random-seed /var/lib/dbus/machine-id /etc/munge/munge.key \
        /etc/ssh/ssh_host_* /etc/ssl/private/ssl-cert-snakeoil.key /etc/ssl/certs/ssl-cert-snakeoil.pem \
        /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid- /etc/.pwd.lock \
        /root/.bash_history; \
    find /var/log -type f -delete; \
    if [ -s /etc/machine-id ]; then : > /etc/machine-id; fi; \
    export PYTHONDONTWRITEBYTECODE=1; \
    printf 'minivm: verify %s\n' 'enroot version'; { enroot version; } || exit 1; \
    printf 'minivm: verify %s\n' 'slurmstepd slurm_script_launcher /bin/true'; { slurmstepd slurm_script_launcher /bin/true; } || exit 1; \
    printf 'minivm: verify %s\n' 'test -z "$(find /usr/bin/enroot* /usr/lib/enroot /usr/bin/mount /usr/bin/umount -perm /6000)"'; { test -z "$(find /usr/bin/enroot* /usr/lib/enroot /usr/bin/mount /usr/bin/umount -perm /6000)"; } || exit 1; \
    rm -rf /root/.cache /tmp/* /var/tmp/*; \
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /etc/hosts -o -path /etc/hostname \
        -o -path /etc/resolv.conf -o -path /etc/mtab -o -path /.dockerenv \) -prune -o -newermt "@$((now - 1))" -exec touch -h -d @1793491200 {} +

# packages
# - bsdextrautils
# - curl
# - jq
# - mount
# - parallel
# - pigz
# - squashfs-tools
# - zstd

# downloads

# artifacts
# - pyxis-build:/usr/src/minivm/out/pyxis/ -> /
# - pyxis-build:/usr/src/minivm/out/enroot/ -> /

# sources
