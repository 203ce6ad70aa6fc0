#!/bin/sh
# This machine's own programs as one directory that works in a root of another architecture: each is told to find its
# loader and its libraries there. They come first in PATH while that root's packages are installed.
#
# Only what does the same whatever machine it runs on: what reads or writes files, never what tells or decides the
# architecture (dpkg itself, ldconfig, uname), and nothing that a layer's own checks are about.
set -eu
at=/mnt/minivm
mkdir -p $at/bin $at/lib $at/usr/bin $at/usr/lib
loader=$(patchelf --print-interpreter /usr/bin/dash)
cp -L "$loader" $at/lib/loader

native() { # PROGRAM TO
    cp -L "$1" "$2"
    ldd "$1" | sed -n 's/.* => \(\/[^ ]*\).*/\1/p' | while read -r library; do
        [ -e "$at/lib/${library##*/}" ] || cp -L "$library" $at/lib/
    done
    # Of the older kind, RPATH: it holds for the libraries' own libraries, too.
    patchelf --set-interpreter $at/lib/loader --force-rpath --set-rpath $at/lib "$2"
}

script() { # NAME, then its lines on standard input
    { echo "#!$at/usr/bin/dash"; cat; } > "$at/bin/$1"
    chmod 755 "$at/bin/$1"
}

for name in dpkg-deb dpkg-split tar gzip sed grep find xargs mawk \
    basename cat chgrp chmod chown cp cut dirname head install ln ls md5sum mkdir mktemp mv readlink realpath rm rmdir \
    sha256sum sort stat tail test touch tr uniq wc; do
    native /usr/bin/$name $at/bin/$name
done
native /usr/bin/dash $at/usr/bin/dash

# Perl's programs are the root's own; Perl's compiled modules are ours.
native /usr/bin/perl $at/usr/bin/perl
cp -a /usr/lib/*-linux-gnu/perl-base $at/usr/lib/perl-base
for name in deb-systemd-helper update-rc.d; do
    script $name <<END
exec $at/usr/bin/perl -I$at/usr/lib/perl-base "\$(PATH=/usr/sbin:/usr/bin command -v $name)" "\$@"
END
done

# It starts Python by its path. Where the root has none yet, there is nothing to compile for.
python=$(readlink -f /usr/bin/python3)
native "$python" "$at$python"
cp -a "/usr/lib/${python##*/}" $at/usr/lib/
sed "s#/usr/bin/python#$at/usr/bin/python#" /usr/bin/py3compile > $at/usr/bin/py3compile
script py3compile <<END
[ -x /usr/bin/py3compile ] || exit 0
exec $at$python $at/usr/bin/py3compile "\$@"
END

# apt gives dpkg a PATH of its own.
echo "DPkg::Path \"$at/bin:/usr/sbin:/usr/bin:/sbin:/bin\";" > $at/apt.conf
