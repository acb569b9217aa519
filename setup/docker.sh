#!/usr/bin/env bash
# docker.sh COMMAND...: runs the command beside a Docker daemon, its own where none answers: with copied layers and without
# a bridge, so that a container with root's name can have one. Exits 3 with a line where there can be none.
set -uo pipefail
docker info >/dev/null 2>&1 && exec "$@"
without() { echo "no Docker daemon answers, and $1" >&2; exit 3; }
command -v dockerd >/dev/null || without "dockerd is not installed (the package docker.io)"
[ "$(id -u)" = 0 ] || without "this is not root, who could start one"
folder=$(mktemp -d)
export DOCKER_HOST="unix://$folder/socket"
dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/pid" --host "$DOCKER_HOST" \
    --storage-driver vfs --bridge none --iptables=false --ip6tables=false >"$folder/log" 2>&1 &
daemon=$!
trap 'kill $daemon 2>/dev/null; wait $daemon; rm -rf "$folder"' EXIT
for _ in $(seq 300); do
    docker info >/dev/null 2>&1 && break
    kill -0 $daemon 2>/dev/null || without "dockerd does not run here ($(tail -n 1 "$folder/log"))"
    sleep 0.2
done
"$@"
