# pyxis-build: pyxis, compiled against the Slurm of this build, and enroot (a builder)
FROM layer:slurm-build
ADD layer.tar /
ARG MINIVM_SOURCES=""
ARG MINIVM_CA=""
RUN set -eu; umask 022; export SOURCE_DATE_EPOCH=1793491200 DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8; \
    begin=$(mktemp); now=$(date +%s); options="-o Dpkg::Use-Pty=0 -o Acquire::Retries=3 -o Acquire::Languages=none"; \
    if [ -n "$MINIVM_SOURCES" ]; then printf '%b' "$MINIVM_SOURCES" > "$begin.list"; chmod 644 "$begin.list"; \
        options="$options -o Dir::Etc::SourceList=$begin.list -o Dir::Etc::SourceParts=/dev/null"; fi; \
    if [ -n "$MINIVM_CA" ]; then printf '%b' "$MINIVM_CA" > "$begin.pem"; chmod 644 "$begin.pem"; \
        options="$options -o Acquire::https::CaInfo=$begin.pem"; export SSL_CERT_FILE="$begin.pem"; fi; \
    mkdir -p /usr/src/minivm/pyxis; \
    tar -x -f /usr/src/minivm/pyxis-0.24.0.tar -C /usr/src/minivm/pyxis --strip-components=1 --no-same-owner; \
    C_INCLUDE_PATH=/usr/src/minivm/include make --silent -C /usr/src/minivm/pyxis; \
    install -D -m 0755 /usr/src/minivm/pyxis/spank_pyxis.so /usr/src/minivm/out/pyxis/usr/lib/x86_64-linux-gnu/slurm/spank_pyxis.so; \
    mkdir -p /usr/src/minivm/enroot; \
    tar -x -f /usr/src/minivm/enroot-4.1.2.tar -C /usr/src/minivm/enroot --strip-components=1 --no-same-owner; \
    make --silent -C /usr/src/minivm/enroot/deps libbsd FORCE_GLIBC=1 CC=gcc; \
    make --silent -C /usr/src/minivm/enroot -o deps DEPS= FORCE_GLIBC=1 prefix= exec_prefix=/usr datarootdir=/usr/share; \
    make --silent -C /usr/src/minivm/enroot -o deps DEPS= FORCE_GLIBC=1 prefix= exec_prefix=/usr datarootdir=/usr/share install DESTDIR=/usr/src/minivm/out/enroot; \
    cp -p /usr/src/minivm/out/enroot/usr/share/enroot/hooks.d/50-slurm-p*.sh /usr/src/minivm/out/enroot/etc/enroot/hooks.d/; \
    rm /usr/src/minivm/out/enroot/etc/enroot/hooks.d/98-nvidia.sh; \
    rm /usr/src/minivm/out/enroot/etc/enroot/hooks.d/10-cgroups.sh; \
    mv /usr/src/minivm/out/enroot/usr/bin/enroot /usr/src/minivm/out/enroot/usr/lib/enroot/enroot; \
    rm /usr/src/minivm/out/enroot/usr/bin/enroot-aufs2ovlfs /usr/src/minivm/out/enroot/usr/bin/enroot-mksquashovlfs; \
    cp -a /usr/src/minivm/ours/. /usr/src/minivm/out/enroot/; \
    mkdir -p /usr/src/minivm/out/enroot/usr/libexec/minivm; \
    gcc -std=gnu17 -O2 -Wall -Wextra -Werror -fstack-protector-strong -fPIE -static-pie -Wl,-z,relro,-z,now -Wl,--build-id=none -s -o /usr/src/minivm/out/enroot/usr/libexec/minivm/slurmstepd /usr/src/minivm/slurmstepd.c; \
    rm -r /usr/src/minivm/enroot; \
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
    rm -rf /root/.cache /tmp/* /var/tmp/*; \
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /etc/hosts -o -path /etc/hostname \
        -o -path /etc/resolv.conf -o -path /etc/mtab -o -path /.dockerenv \) -prune -o -newermt "@$((now - 1))" -exec touch -h -d @1793491200 {} +

# packages

# downloads
# - enroot
# - pyxis

# artifacts

# sources
