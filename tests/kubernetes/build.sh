#!/bin/bash
# build.sh OUT WORK: Kubernetes 1.20.2's own programs, from Debian 12's source package.
#
# Wants a Debian 12 with apt, dpkg and coreutils: no root, no compiler, no git, and installs nothing. All comes from the
# repositories that the machine's apt knows already, through an apt state of its own, so that the machine's lists and
# packages stay as they are. Two builds are bit-identical.
# OUT gets bin/ and cni/. WORK may be kept after a build that was cut: what was compiled is not compiled again.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=$(realpath -m "$1") WORK=$(realpath -m "$2")
PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)
RELEASE=bookworm GO=1.19 VERSION=v1.20.2 COMMIT=faecb196815e248d3ecfb03c680a4507229c2a56
SECONDS=0
say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

mkdir -p "$WORK"
cd "$WORK"
rm -rf apt debs tools gopath
mkdir -p "$OUT/bin" "$OUT/cni" apt/{lists/partial,cache/archives/partial,parts} debs tools gopath/src/k8s.io

# An apt of our own: the machine's Debian sources, with the source packages switched on.
: > apt/list
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -f "$file" ] || continue
    sed -nE "s/^deb(-src)? +(.*$RELEASE.*)/deb \2\ndeb-src \2/p" "$file" | sort -u >> apt/list
done
for file in /etc/apt/sources.list.d/*.sources; do
    grep -qs "$RELEASE" "$file" || continue
    sed -E 's/^Types:.*/Types: deb deb-src/' "$file" > "apt/parts/$(basename "$file")"
done
cat > apt/conf << END
Dir::Etc::sourcelist "$WORK/apt/list";
Dir::Etc::sourceparts "$WORK/apt/parts";
Dir::State::Lists "$WORK/apt/lists";
Dir::Cache "$WORK/apt/cache";
APT::Sandbox::User "";
Acquire::Languages "none";
END
export APT_CONFIG=$WORK/apt/conf
apt-get -qq update

# Tools are unpacked here, not installed.
(cd debs && apt-get -qq download "golang-$GO-go" "golang-$GO-src" golang-github-modern-go-reflect2-dev patch xz-utils \
    etcd-server containerd runc containernetworking-plugins libseccomp2)
for package in debs/*.deb; do dpkg-deb -x "$package" tools; done
export GOROOT=$WORK/tools/usr/lib/go-$GO
export PATH=$GOROOT/bin:$WORK/tools/usr/bin:$PATH
(cd debs && apt-get -qq --download-only source kubernetes 2> apt.log) || { cat debs/apt.log >&2; exit 1; }
say "downloaded $(du -sch debs apt/lists | tail -1 | cut -f1)"

# The source with Debian's patches.
SOURCE=$WORK/gopath/src/k8s.io/kubernetes
mkdir "$SOURCE"
tar xzf debs/kubernetes_*.orig.tar.gz -C "$SOURCE" --strip-components=1
xz -dc debs/kubernetes_*.debian.tar.xz | tar x -C "$SOURCE"
cd "$SOURCE"
while read -r change; do patch -s -p1 < "debian/patches/$change"; done < debian/patches/series
# The reflect2 that comes with the source walks maps wrongly when compiled by Go 1.18 or newer, and the programs crash;
# Debian's own package of it does not.
rm -r vendor/github.com/modern-go/reflect2
cp -rL "$WORK/tools/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/reflect2

# One file of generated code is missing in the source package.
export GOPATH=$WORK/gopath GO111MODULE=off CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false" GOPROXY=off
export GOCACHE=$WORK/gocache HOME=$WORK
go build -o "$WORK/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
wanted=$(grep -rl --include=*.go '+k8s:openapi-gen=' pkg staging/src/k8s.io cmd plugin |
    grep -Ev '/(code-generator|sample-apiserver)/' | xargs -n1 dirname | sort -u |
    sed 's#^staging/src/#vendor/#; s#^#k8s.io/kubernetes/#' | paste -sd,)
"$WORK/openapi-gen" -i "$wanted" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$WORK/violations"
say "code generated"

flags="-s -w"
for package in component-base/version client-go/pkg/version; do
    name=k8s.io/kubernetes/vendor/k8s.io/$package
    flags+=" -X $name.gitVersion=$VERSION -X $name.gitMajor=1 -X $name.gitMinor=20"
    flags+=" -X $name.gitTreeState=clean -X $name.gitCommit=$COMMIT"
done
for program in "${PROGRAMS[@]}"; do
    go build -ldflags "$flags" -o "$OUT/bin/$program" "./cmd/$program"
    say "$program"
done
go build -ldflags "-s -w" -o "$OUT/bin/pause" "$HERE/pause.go"
cp "$WORK"/tools/usr/bin/{etcd,containerd,containerd-shim-runc-v2,ctr} "$WORK/tools/usr/sbin/runc" "$OUT/bin/"
cp "$WORK"/tools/usr/lib/cni/* "$OUT/cni/"
say "done"
