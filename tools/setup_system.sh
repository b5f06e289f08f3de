#!/bin/sh
# Usage: setup_system.sh VENV
# Makes sure that the system has what a build needs, through apt where that is allowed, and creates VENV. Where it may
# not install, it prints the exact command and fails only if the build cannot do without.
set -eu
venv=$1

# The first Python that is new enough and complete.
find_python() {
  for name in "${PYTHON3:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
}

complete_python() {
  "$1" - 2>/dev/null <<'CHECK'
import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
CHECK
}

gcc_is_new() { [ "$("${CXX:-g++}" -dumpversion 2>/dev/null | cut -d. -f1)" -ge 11 ] 2>/dev/null; }

has_catch2() { ls /usr/include/catch2 /usr/local/include/catch2 "${CMAKE_PREFIX_PATH:-/nowhere}/include/catch2" 2>/dev/null | grep -q .; }

has_zlib() { echo '#include <zlib.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }

has_openssl() { echo '#include <openssl/evp.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }

has_libdeflate() { echo '#include <libdeflate.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }

needed=
wanted=
gcc_is_new || needed="$needed g++"
python=$(find_python)
if [ -z "$python" ]; then
  # Ubuntu 22.04's python3 is 3.10, with python3.11 beside it.
  case "$(. /etc/os-release && echo "${ID:-}${VERSION_ID:-}")" in
    ubuntu22.04) needed="$needed python3.11 python3.11-venv python3.11-dev" ;;
    *) needed="$needed python3 python3-venv python3-dev" ;;
  esac
elif ! complete_python "$python"; then
  needed="$needed $python-venv $python-dev"
fi
has_zlib || needed="$needed zlib1g-dev"
has_openssl || wanted="$wanted libssl-dev"
has_libdeflate || wanted="$wanted libdeflate-dev"
command -v ip >/dev/null || wanted="$wanted iproute2"
has_catch2 || wanted="$wanted catch2"
command -v ccache >/dev/null || wanted="$wanted ccache"
# For the site and for tests of launchers: in a container. To a person's machine, through sudo, comes none of it, least of all daemons;
# those tests are skipped there.
if [ "$(id -u)" = 0 ]; then
  command -v doxygen >/dev/null || wanted="$wanted doxygen"
  command -v mpirun >/dev/null || wanted="$wanted openmpi-bin"
  for package in munge:munged slurmctld:slurmctld slurmd:slurmd slurm-client:srun; do
    PATH="$PATH:/usr/sbin" command -v "${package#*:}" >/dev/null || wanted="$wanted ${package%:*}"
  done
fi

if [ -n "$needed$wanted" ]; then
  as_root=
  [ "$(id -u)" = 0 ] || as_root="sudo -n"
  command="apt-get install -y --no-install-recommends$needed$wanted"
  if command -v apt-get >/dev/null && $as_root true 2>/dev/null; then
    $as_root apt-get update -qq || true
    # shellcheck disable=SC2086 # a list of packages
    DEBIAN_FRONTEND=noninteractive $as_root $command >&2 || echo "Not installed:$needed$wanted" >&2
  else
    echo "Missing:$needed$wanted. Install with: sudo $command" >&2
  fi
fi

python=$(find_python)
if [ -z "$python" ]; then
  echo "Muster needs Python 3.11 or newer; none was found. Install one, or name it: PYTHON3=/path/to/python3 make" >&2
  exit 1
fi
if ! complete_python "$python"; then
  echo "$python lacks the venv module or its headers: install $python-venv and $python-dev (or their like)." >&2
  exit 1
fi
if ! gcc_is_new; then
  echo "Muster needs g++ 11 or newer; ${CXX:-g++} is missing or older. Install it, or name one: CXX=g++-12 make" >&2
  exit 1
fi

if [ -x "$venv/bin/python" ]; then
  "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && exit 0
  echo "$venv holds a Python older than 3.11: remove it, or choose another folder with make VENV=..." >&2
  exit 1
fi
"$python" -m venv "$venv"
