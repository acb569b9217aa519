#!/usr/bin/env bash
# bubblewrap.sh: installs bubblewrap where that takes nothing but apt-get and root's rights.
# Exits 0 where bwrap runs. Else it prints one line that says why, and exits 1: nothing but the tests of that level of
# sandbox needs it.
set -uo pipefail

without() {
    echo "bubblewrap: $1; tests of sandboxes at that level will not run" >&2
    exit 1
}

if ! command -v bwrap >/dev/null; then
    [ "$(uname)" = Linux ] || without "it needs Linux"
    command -v apt-get >/dev/null || without "not installed; install the package 'bubblewrap'"
    [ "$(id -u)" = 0 ] || without "not installed, and this is not root; run 'sudo apt-get install bubblewrap'"
    echo "installing the package bubblewrap (once; for the tests of sandboxes)"
    export DEBIAN_FRONTEND=noninteractive
    install="timeout 120 apt-get install -y -qq --no-install-recommends bubblewrap"
    $install </dev/null >/dev/null 2>&1 || {
        timeout 120 apt-get update -qq </dev/null >/dev/null 2>&1
        said=$($install </dev/null 2>&1) || without "apt-get could not install it ($(echo "$said" | grep -v '^W:' | tail -n 1))"
    }
fi
said=$(bwrap --unshare-pid --unshare-net --ro-bind / / true 2>&1) ||
    without "it is installed and does not run here ($said); the kernel or the container lacks namespaces"
