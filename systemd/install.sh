# Installing as a service, and taking that back. Sourced by ./dev, whose functions it uses.
#
# A release is a virtual environment of its own, /opt/ckptfs/releases/ID; /opt/ckptfs/bin is a link to the `bin`
# of the one in use. So an upgrade is one rename, a daemon that runs keeps the files that it was started from, and a
# second call finds that nothing is to be done. The release before stays, for going back: `systemctl stop` of all
# mounts, ln -sfn, `systemctl start`. (An older release may not know what systemd keeps of a mount that runs, and then
# neither goes on with it nor lets it go.)
# shellcheck shell=sh

opt=/opt/ckptfs
units=/etc/systemd/system
local=/usr/local

# Makes the release and sets $release to its folder. It is whole when it has its stamp.
make_release() {
    want=$(fingerprint "requirements/build.lock requirements/runtime.lock"
        cd "$root" && find daemon fusefs gpu store -name '*.py' -type f | LC_ALL=C sort | xargs cat | sha256sum)
    release=$opt/releases/$(printf '%s' "$want" | sha256sum | cut -c1-12)
    [ ! -e "$release/stamp" ] || return 0
    python=$(find_python) || die "no Python 3.11 or newer; on Debian: apt-get install python3"
    install_packages "$python"
    echo "dev: making $release with $python" >&2
    mkdir -p "$opt/releases"
    "$python" -m venv --clear "$release"
    # The build leaves files beside what it builds, which is not ours to write to.
    copy=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$copy'" EXIT
    cp -R "$root/daemon" "$root/fusefs" "$root/gpu" "$root/store" "$root/pyproject.toml" "$root/README.md" \
        "$root/LICENSE" "$copy"
    find "$copy" -name '*.so' -delete
    venv=$release
    pip install -r "$requirements/build.lock" -r "$requirements/runtime.lock"
    pip install --no-deps --no-build-isolation "$copy"
    cp "$root/README.md" "$release/README.md"
    : >"$release/stamp"
}

# Whether the systemd that is installed is of a version, or newer. It can wait until a reload has ended from 253 on,
# and tells a service from 254 on how many descriptors it keeps for it ($FDSTORE).
systemd_is() {
    version=$(systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge "$1" ]
}

# What the unit of $1 needs besides, with the systemd that is installed: in $units/$1.service.d.
install_drop_ins() {
    rm -f "$units/$1.service.d/fdstore.conf"
    install -d "$units/$1.service.d"
    if systemd_is 253; then
        printf '[Service]\nType=notify-reload\nExecReload=\n' >"$units/$1.service.d/reload.conf"
    fi
    if ! systemd_is 254; then
        # It keeps them all the same: FileDescriptorStoreMax= of the unit.
        printf '[Service]\nEnvironment=FDSTORE=4\n' >"$units/$1.service.d/fdstore.conf"
    fi
}

tell_systemd() {
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
}

install_service() {
    [ "$(id -u)" -eq 0 ] || die "installing needs root: sudo ./dev install"
    make_release
    ln -sfn "$release/bin" "$opt/bin.new"
    mv -T "$opt/bin.new" "$opt/bin"
    install -m 0644 "$root/README.md" "$opt/README.md"
    install -d "$units" /etc/ckptfs "$local/bin" /etc/tmpfiles.d
    install -m 0644 "$root/systemd/ckptfs.service" "$root/systemd/ckptfs@.service" "$units"
    for name in ckptfs ckptfs@; do
        install_drop_ins "$name"
    done
    install -m 0644 "$root/systemd/ckptfs.tmpfiles.conf" /etc/tmpfiles.d/ckptfs.conf
    ! command -v systemd-tmpfiles >/dev/null || systemd-tmpfiles --create /etc/tmpfiles.d/ckptfs.conf
    # What somebody has changed stays.
    [ -e /etc/ckptfs/config.toml ] || install -m 0644 "$root/examples/config.toml" /etc/ckptfs/config.toml
    ln -sfn "$opt/bin/ckptfs" "$local/bin/ckptfs"
    install_help
    remove_old_releases
    tell_systemd
    cat <<TEXT
ckptfs is installed in $opt. For a mount at /mnt/ckpt, with /etc/ckptfs/config.toml:
  systemctl enable --now ckptfs
For one elsewhere:
  cp /etc/ckptfs/config.toml /etc/ckptfs/mnt-scratch.toml && systemctl enable --now ckptfs@mnt-scratch
Mounts that run go on with the release before until: systemctl restart ckptfs
Before going back to an older release stop them: systemctl stop ckptfs
TEXT
}

# Completion for bash, and the manual page; both are made from the help of the commands.
install_help() {
    completions=$local/share/bash-completion/completions
    install -d "$completions" "$local/share/man/man1"
    "$release/bin/python" -m ckptfs.daemon.cli_pages completion >"$completions/ckptfs"
    "$release/bin/python" -m ckptfs.daemon.cli_pages man >"$local/share/man/man1/ckptfs.1"
}

# All but the one in use and the newest besides.
remove_old_releases() {
    # shellcheck disable=SC2012 # names of hex digits
    ls -1t "$opt/releases" | grep -vxF "$(basename "$release")" | tail -n +2 | while read -r old; do
        rm -rf "${opt:?}/releases/$old"
    done
}

uninstall_service() {
    [ "$(id -u)" -eq 0 ] || die "this needs root: sudo ./dev uninstall"
    if [ -d /run/systemd/system ]; then
        running=$(systemctl list-units --all --plain --no-legend 'ckptfs.service' 'ckptfs@*.service' | cut -d' ' -f1)
        # shellcheck disable=SC2086 # a list of words
        [ -z "$running" ] || systemctl disable --now $running
    fi
    rm -rf "$units/ckptfs.service" "$units/ckptfs@.service" "$units/ckptfs.service.d" "$units/ckptfs@.service.d" \
        /etc/tmpfiles.d/ckptfs.conf "$opt" "$local/share/bash-completion/completions/ckptfs" \
        "$local/share/man/man1/ckptfs.1"
    [ "$(readlink "$local/bin/ckptfs")" != "$opt/bin/ckptfs" ] || rm -f "$local/bin/ckptfs"
    tell_systemd
    echo "ckptfs is uninstalled. What is stored in /var/lib/ckptfs, and keys and configuration in /etc/ckptfs, stay."
}
