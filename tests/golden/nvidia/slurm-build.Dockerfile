# slurm-build: Slurm from its tarball, with munge, PMIx, NVML, JWT, Lua and cgroup v2 (a builder; the compiled tree ships by role)
FROM layer:os
ADD layer.tar /
ARG MINIVM_SOURCES=""
ARG MINIVM_CA=""
RUN set -eu; umask 022; export SOURCE_DATE_EPOCH=1793491200 DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8; \
    begin=$(mktemp); now=$(date +%s); options="-o Dpkg::Use-Pty=0 -o Acquire::Retries=3 -o Acquire::Languages=none"; \
    if [ -n "$MINIVM_SOURCES" ]; then printf '%b' "$MINIVM_SOURCES" > "$begin.list"; chmod 644 "$begin.list"; \
        options="$options -o Dir::Etc::SourceList=$begin.list -o Dir::Etc::SourceParts=/dev/null"; fi; \
    if [ -n "$MINIVM_CA" ]; then printf '%b' "$MINIVM_CA" > "$begin.pem"; chmod 644 "$begin.pem"; \
        options="$options -o Acquire::https::CaInfo=$begin.pem"; export SSL_CERT_FILE="$begin.pem"; fi; \
    mkdir -p /usr/src/minivm/slurm /usr/src/minivm/out/all; \
    tar -x -f /usr/src/minivm/slurm-wlm_26.05.5.orig.tar.gz -C /usr/src/minivm/slurm --strip-components=1 --no-same-owner; \
    { cd /usr/src/minivm/slurm && found=$(sed -n 's/^ *Version:[[:space:]]*//p' META) && case '26.05.5' in "$found"|"$found"-*) ;; *) echo "minivm: the tarball is Slurm $found, and not 26.05.5"; exit 1;; esac; } || exit 1; \
    { cd /usr/src/minivm/slurm && ./configure --quiet --prefix=/usr --sysconfdir=/etc/slurm --libdir=/usr/lib/x86_64-linux-gnu --localstatedir=/var --runstatedir=/run --disable-static --disable-developer --with-munge --with-jwt --with-yaml --with-json --with-libhttp_parser --with-hwloc --with-nvml=/usr/local/cuda --with-pmix=/usr/lib/x86_64-linux-gnu/pmix2 --with-pam_dir=/usr/lib/x86_64-linux-gnu/security --without-rsmi --without-oneapi --without-ucx --without-hdf5 --without-rdkafka --with-lua --with-bpf --disable-x11 > /usr/src/minivm/configure.log 2>&1 || { tail -n 40 /usr/src/minivm/configure.log; exit 1; }; } || exit 1; \
    make --silent -C /usr/src/minivm/slurm -j $(nproc); \
    make --silent -C /usr/src/minivm/slurm/contribs/pam_slurm_adopt -j $(nproc); \
    make --silent -C /usr/src/minivm/slurm install DESTDIR=/usr/src/minivm/out/all; \
    make --silent -C /usr/src/minivm/slurm/contribs/pam_slurm_adopt install DESTDIR=/usr/src/minivm/out/all; \
    find /usr/src/minivm/out/all -name '*.la' -delete; \
    rm -rf /usr/src/minivm/out/all/usr/share/doc; \
    { find /usr/src/minivm/out/all -type f \( -perm /111 -o -name '*.so*' \) -exec sh -c 'for f; do strip --strip-unneeded "$f" 2>/dev/null || true; done' sh {} +; } || exit 1; \
    mkdir -p /usr/src/minivm/out/controller/usr/sbin /usr/src/minivm/out/worker/usr/sbin /usr/src/minivm/out/login/usr/sbin /usr/src/minivm/out/worker/usr/lib/x86_64-linux-gnu/slurm; \
    { cd /usr/src/minivm/out/all/usr/sbin && mv slurmctld slurmdbd slurmrestd /usr/src/minivm/out/controller/usr/sbin/; } || exit 1; \
    { cd /usr/src/minivm/out/all/usr/sbin && mv slurmd slurmstepd /usr/src/minivm/out/worker/usr/sbin/; } || exit 1; \
    { cd /usr/src/minivm/out/all/usr/sbin && cp sackd /usr/src/minivm/out/worker/usr/sbin/ && mv sackd /usr/src/minivm/out/login/usr/sbin/; } || exit 1; \
    mv /usr/src/minivm/out/all/usr/lib/x86_64-linux-gnu/security /usr/src/minivm/out/worker/usr/lib/x86_64-linux-gnu/; \
    mv /usr/src/minivm/out/all /usr/src/minivm/out/common; \
    { mkdir -p /usr/src/minivm/include && mv /usr/src/minivm/out/common/usr/include/slurm /usr/src/minivm/include/; } || exit 1; \
    { for part in common/usr/lib/x86_64-linux-gnu/slurm/gpu_nvml.so common/usr/lib/x86_64-linux-gnu/slurm/mpi_pmix.so common/usr/lib/x86_64-linux-gnu/slurm/auth_jwt.so common/usr/lib/x86_64-linux-gnu/slurm/auth_munge.so common/usr/lib/x86_64-linux-gnu/slurm/auth_slurm.so common/usr/lib/x86_64-linux-gnu/slurm/accounting_storage_mysql.so common/usr/lib/x86_64-linux-gnu/slurm/cgroup_v2.so common/usr/lib/x86_64-linux-gnu/slurm/cli_filter_lua.so common/usr/lib/x86_64-linux-gnu/slurm/job_submit_lua.so worker/usr/lib/x86_64-linux-gnu/security/pam_slurm_adopt.so; do test -e /usr/src/minivm/out/$part || { echo "minivm: Slurm was built without $part"; exit 1; }; done; } || exit 1; \
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
# - bzip2
# - cuda-nvml-dev-13-0
# - gcc
# - libdbus-1-dev
# - libhttp-parser-dev
# - libhwloc-dev
# - libjson-c-dev
# - libjwt-dev
# - liblua5.4-dev
# - libmariadb-dev
# - libmunge-dev
# - libnuma-dev
# - libpam0g-dev
# - libpmix-dev
# - libreadline-dev
# - libyaml-dev
# - make
# - pkgconf
# - python3
# - xz-utils

# downloads
# - slurm

# artifacts

# sources
# - cuda
