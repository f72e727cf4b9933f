#!/usr/bin/env bash
# Makes .venv and installs the package into it, editable. Usage: scripts/setup.sh [hf,dev,plot]
#
# Needs Python 3.11 or newer with its headers and a C++ compiler; what is missing is installed by apt-get
# where that is allowed, else named in one line. Without liburing the build goes on with the thread
# engine alone. A second call does nothing unless an input of the build has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-}
torch_version=$(sed -n 's/^torch==//p' constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu
stamp=.venv/.infinity-setup

say() { echo "setup: $*"; }
die() {
  echo "setup: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found; install one, for example: apt-get install python3.11-full"
}

has_header() { # name, compiler arguments
  echo "#include <$1>" | "${CXX:-c++}" "${@:2}" -E -x c++ - >/dev/null 2>&1
}

python_include() { "$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])'; }

# System packages. Only what is missing is asked for; a refusal is no error here.
install_packages() {
  local missing=() version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  command -v "${CXX:-c++}" >/dev/null || missing+=(g++)
  has_header liburing.h || missing+=(liburing-dev)
  [ -e "$(python_include)/Python.h" ] || missing+=("python$version-dev")
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python$version-venv")
  [ ${#missing[@]} -gt 0 ] || return 0
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get)
  [ "$(id -u)" = 0 ] || apt=(sudo -n "${apt[@]}")
  if command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
    say "installing ${missing[*]}"
    "${apt[@]}" install -y -q "${missing[@]}" >/dev/null 2>&1 && return
    "${apt[@]}" update -q >/dev/null 2>&1 &&
      "${apt[@]}" install -y -q "${missing[@]}" >/dev/null 2>&1 && return
  fi
  say "please run: sudo apt-get install ${missing[*]}"
}

fingerprint() {
  {
    cat pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh
    find io csrc -type f | LC_ALL=C sort | xargs cat
    "$python" -VV
    if has_header liburing.h; then echo liburing; fi
  } | sha256sum | cut -d ' ' -f 1
}

# The stamp holds the fingerprint and every extra that was installed with it.
installed_extras() {
  [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$1" ] && sed -n 2p "$stamp" || true
}

is_covered() { # wanted, installed: comma-separated
  local extra
  for extra in ${1//,/ }; do [[ ",$2," == *",$extra,"* ]] || return 1; done
}

# The default build of torch brings gigabytes of CUDA; a machine without a GPU does not need them.
torch_index() {
  [ -e /dev/nvidiactl ] && return # A container may have other GPUs than the first.
  "$python" - "$cpu_index/" <<'PROBE' 2>/dev/null && echo "--extra-index-url=$cpu_index"
import sys
import urllib.request

urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PROBE
  return 0
}

install_torch() {
  if .venv/bin/python -c "
import sys
from importlib.metadata import version
sys.exit(version('torch').split('+')[0] != '$torch_version')" 2>/dev/null; then
    return
  fi
  local index
  index=$(torch_index)
  # shellcheck disable=SC2086 # No index is no argument.
  "${pip[@]}" $index "torch==$torch_version" || "${pip[@]}" "torch==$torch_version"
}

python=$(find_python)
[ ! -x .venv/bin/python ] || python=$PWD/.venv/bin/python
print=$(fingerprint)
have=$(installed_extras "$print")
if [ -e "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$print" ] && is_covered "$extras" "$have"; then
  exit 0
fi

install_packages
command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler: sudo apt-get install g++"
if [ ! -x .venv/bin/python ]; then
  "$python" -m venv .venv ||
    die "python has no working venv module: sudo apt-get install python3-venv"
  python=$PWD/.venv/bin/python
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt)
all=$(echo "$extras,$have" | tr ',' '\n' | sed '/^$/d' | LC_ALL=C sort -u | paste -sd, -)
say "installing into .venv${all:+ with extras $all}"
"${pip[@]}" cffi cmake ninja pybind11 scikit-build-core
# Without isolation: the tools above are used, and a rebuild finds its build folder again. The compiler
# runs while pip unpacks torch, which takes one core; the second call finds nothing to compile.
package=(env PATH="$PWD/.venv/bin:$PATH" "${pip[@]}" --no-build-isolation)
"${package[@]}" --no-deps -e . &
build=$!
install_torch || { wait "$build" || true; die "torch could not be installed"; }
wait "$build"
"${package[@]}" -e ".${all:+[$all]}"
# Aside, for the test that needs it: PEFT imports a torchao that it finds, whatever it is used for.
[[ ",$all," != *,dev,* ]] || "${pip[@]}" --no-deps --upgrade --target .venv/torchao torchao
.venv/bin/python -c '
from infinity import _core
if not _core.HAS_URING:
    print("setup: built without io_uring; the thread engine is used. To change that: "
          "sudo apt-get install liburing-dev, then run this again")'

printf '%s\n%s\n' "$(fingerprint)" "$all" >"$stamp"
say "done"
