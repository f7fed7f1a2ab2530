#!/bin/sh
# ckptfs in a real systemd: a Debian tree in systemd-nspawn, in which inside.py installs, breaks and removes it.
#
#   ./dev systemd-test [RELEASE]     RELEASE of Debian: bookworm (the default), trixie
#
# Needs root, systemd-nspawn (package systemd-container), mmdebstrap, overlayfs, /dev/fuse and the network. The tree
# is made once, in CKPTFS_TEST_TREES (/var/tmp/ckptfs-trees); every run works on an overlay of it. NSPAWN_ARGS are
# further arguments of systemd-nspawn, such as --bind-ro= of what pip needs to find its packages.
set -eu
release=${1:-bookworm}
trees=${CKPTFS_TEST_TREES:-/var/tmp/ckptfs-trees}
root=$(dirname "$(dirname "$(dirname "$(readlink -f "$0")")")")
tree=$trees/$release
packages=systemd,systemd-sysv,dbus,python3,python3-venv,python3-dev,fuse3,libfuse3-dev,gcc,libc6-dev,pkg-config
packages=$packages,git,ca-certificates,procps,util-linux

die() { echo "systemd-test: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || die "needs root"
[ -e /dev/fuse ] || die "no /dev/fuse"
for command in systemd-nspawn mmdebstrap; do
    command -v "$command" >/dev/null || die "$command is missing: apt-get install systemd-container mmdebstrap"
done

if [ ! -e "$tree/etc/os-release" ]; then
    mkdir -p "$trees"
    rm -rf "$tree.new"
    mmdebstrap --quiet --variant=minbase --include="$packages" "$release" "$tree.new"
    mv "$tree.new" "$tree"
fi

work=$(mktemp -d "$trees/run.XXXXXX")
clean_up() {
    umount "$work/root" 2>/dev/null || true
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
mkdir "$work/upper" "$work/scratch" "$work/root" "$work/state" "$work/out"
mount -t overlay -o "lowerdir=$tree,upperdir=$work/upper,workdir=$work/scratch" ckptfs-test "$work/root"
cp -R "$root/tests/systemd/inside.py" "$work/out/"
cat >"$work/root/etc/systemd/system/inside.service" <<'UNIT'
[Unit]
Description=The test of ckptfs
Wants=network.target
After=multi-user.target
[Service]
Type=oneshot
Environment=HOME=/root
EnvironmentFile=-/out/environment
ExecStart=/usr/bin/python3 -u /out/inside.py
ExecStopPost=/bin/sh -c 'echo "$SERVICE_RESULT" >/out/result; systemctl --no-block poweroff'
StandardOutput=append:/out/log
StandardError=append:/out/log
TimeoutStartSec=900
UNIT
mkdir -p "$work/root/etc/systemd/system/multi-user.target.wants"
ln -sf ../inside.service "$work/root/etc/systemd/system/multi-user.target.wants/inside.service"
env | grep -E '^(PIP_|SSL_CERT|https?_proxy)' | sed 's/^\([^=]*\)=\(.*\)$/\1="\2"/' >"$work/out/environment" || true

# The state lies on the disk itself: an overlay takes no leases.
# shellcheck disable=SC2086 # a list of words
timeout 1200 systemd-nspawn --quiet --register=no --keep-unit --directory="$work/root" --boot \
    --resolv-conf=copy-host --bind=/dev/fuse --bind="$work/state:/var/lib/ckptfs" --bind="$work/out:/out" \
    --bind-ro="$root:/src" ${NSPAWN_ARGS:-} </dev/null >"$work/console" 2>&1 || true
cat "$work/out/log" 2>/dev/null || { cat "$work/console"; die "it did not start"; }
[ "$(cat "$work/out/result" 2>/dev/null)" = success ] || { tail -n 20 "$work/console"; die "failed"; }
