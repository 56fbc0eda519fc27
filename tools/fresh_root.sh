#!/usr/bin/env bash
# Runs a command in a clone of this commit on a machine made from nothing: a Debian 12 of apt, git, make, sudo and certificates.
#   tools/fresh_root.sh [--user] [--keep] [--bind FOLDER]... [--root FOLDER] COMMAND...      e.g. tools/fresh_root.sh make demo
# --root  where it is made (build/fresh-root): 300 MB, 8 GB after `make test`; in 40 s. It is removed at the end,
# --keep  unless this is said: it stays, and the next call with the same folder takes it as it is, with the newest commit.
# --user  the command runs as an ordinary user, who has sudo; else as root.
# --bind  a folder of this machine is visible inside, read-only, at the same path (a CUDA toolkit).
# Needs root and mmdebstrap. Ends with the command's code, or with 125 where this machine cannot make or enter such a root. No compiler, header
# or Python package of this machine is visible inside. Its package sources, settings of apt and pip, certificates and names of
# hosts are. What is mounted is mounted in a namespace of its own and goes with its last process, however that ends.
set -euo pipefail

cannot() { printf 'fresh-root: %s\n' "$*" >&2; exit 125; }

repository=$(cd "$(dirname "$0")/.." && pwd)
root=$repository/build/fresh-root user=root keep='' binds=()
while [ $# -gt 0 ]; do
  case $1 in
    --root) root=$2; shift 2 ;;
    --bind) binds+=("$(realpath "$2")"); shift 2 ;;
    --user) user=newcomer; shift ;;
    --keep) keep=1; shift ;;
    -*) cannot "unknown option $1" ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || cannot "no command: tools/fresh_root.sh make test"
[ "$(id -u)" = 0 ] || cannot "needs root: sudo $0 ..."
command -v mmdebstrap >/dev/null || cannot "needs mmdebstrap: apt-get install mmdebstrap"
unshare --mount --pid --fork true 2>/dev/null || cannot "this machine does not let root make namespaces"
mkdir -p "$root"
root=$(cd "$root" && pwd)
exec 9<"$root"
flock --nonblock 9 || cannot "another run is in $root: name a folder with --root"
remove() { find "$root" -xdev -mindepth 1 -delete; }  # nothing is mounted beneath it, but by hand
{ [ -n "$keep" ] && [ -e "$root/etc/made" ]; } || remove  # what a run that was killed left
inside=
finish() {
  [ -z "$inside" ] || { kill -KILL "$inside" && wait; } 2>/dev/null || true  # and with it all that runs inside
  [ -n "$keep" ] || { remove && rmdir "$root"; }
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# The machine: the sources and settings that apt has here, where this is the same distribution.
make_machine() {
  local settings=$1/apt.conf sources=$1/sources.list path
  apt-config dump 2>/dev/null | grep '^Acquire::' | grep -vE '^Acquire::(cdrom|IndexTargets|Changelogs)' >"$settings" || true
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Identifier: Packages' 2>/dev/null |
    grep -E ' bookworm(-updates|-security)? ' | sort -u >"$sources" || true
  grep -q ' bookworm ' "$sources" || echo 'deb http://deb.debian.org/debian bookworm main' >"$sources"
  mmdebstrap --quiet --mode=root --variant=apt --include=ca-certificates,git,make,sudo --aptopt="$settings" bookworm "$root" "$sources" ||
    cannot "mmdebstrap could not make a Debian 12; its own message is above"
  for path in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt /usr/local/share/ca-certificates; do
    [ ! -e "$path" ] || { mkdir -p "$root$(dirname "$path")" && cp -rLT "$path" "$root$path"; }
  done
  chroot "$root" useradd --create-home --shell /bin/bash newcomer
  echo 'newcomer ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/newcomer"
  touch "$root/etc/made"
}
if [ ! -e "$root/etc/made" ]; then
  work=$(mktemp -d)
  make_machine "$work"
  rm -rf "$work"
fi
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"

[ -z "$(git -C "$repository" status --porcelain 2>/dev/null)" ] || echo "fresh-root: what is not committed is not in the clone" >&2
source=$root/src/tierflow
if [ -e "$source/.git" ]; then
  git -c safe.directory='*' -C "$source" fetch -q "$repository" HEAD
  # Files whose owner changed would be written anew, and all that was built of them built again.
  git -c safe.directory='*' -C "$source" update-index -q --refresh || true
  git -c safe.directory='*' -C "$source" checkout -q --force --detach FETCH_HEAD
else
  git clone -q --no-hardlinks "$repository" "$source"
fi
chown -R "$(chroot "$root" id -u "$user"):$(chroot "$root" id -g "$user")" "$source"

# Settings of this environment that name servers and certificates; the files and folders that they name are there as well.
passed=()
while IFS='=' read -r name value; do
  passed+=("$name=$value")
  [ ! -f "$value" ] || [ -e "$root$value" ] || install -D -m 644 "$value" "$root$value"
  [ ! -d "$value" ] || [ -e "$root$value" ] || binds+=("$value")
done < <(env | grep -E '^(PIP_[A-Z_]*|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(HTTPS?|https?|NO|no|ALL|all)_(PROXY|proxy)|CI|TERM|JOBS|STEPS)=')

setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child bash -c '
  set -e
  root=$1 user=$2 count=$3; shift 3
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  for ((; count > 0; count--)); do
    mkdir -p "$root$1"
    mount --bind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
    shift
  done
  exec chroot "$root" runuser -u "$user" -- "$@"' _ "$root" "$user" "${#binds[@]}" "${binds[@]}" \
  env -i "HOME=$(chroot "$root" sh -c "echo ~$user")" "USER=$user" LANG=C.UTF-8 \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "${passed[@]}" \
  bash -c 'cd /src/tierflow && exec "$@"' _ "$@" <&0 &
inside=$!
status=0
wait "$inside" || status=$?
inside=
exit "$status"
