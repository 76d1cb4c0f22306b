#!/usr/bin/env bash
# Everything a bare Debian 12 or Ubuntu needs: system packages, .venv, kp built from source, the project.
# Prints to stderr only and reads no standard input, so that `make chat` can be piped (but for --stamp). When nothing is left to do it ends
# in a fraction of a second. Package indexes, certificates and time-outs are whatever pip and apt are configured to use.
set -euo pipefail
cd "$(dirname "$0")/.."
exec 8>&1 </dev/null >&2

KP_VERSION=0.9.0
KP_RECIPE=2 # raise it when the way kp is built changes, so that no older wheel is taken
ROOT=$PWD
PY=$ROOT/.venv/bin/python
STAMP=$ROOT/.venv/setup-stamp # and, beside it, setup-stamp-dev
CORE_PACKAGES=(python3 python3-venv)
VULKAN_PACKAGES=(python3-dev cmake g++ make libvulkan-dev libfmt-dev glslang-tools mesa-vulkan-drivers vulkan-tools
    spirv-tools vulkan-validationlayers)  # the last two for the tests

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# What the last complete set-up was made from: the recipe, the Python, the place, and which system packages are absent.
stamp_now() {
    sha256sum pyproject.toml tools/setup.sh | cut -d' ' -f1
    readlink -f .venv/bin/python
    echo "$ROOT"
    missing_packages | tr '\n' ' '
}

# The Debian packages that are not installed, one a line; nothing where there is no dpkg to ask.
missing_packages() {
    command -v dpkg-query >/dev/null || return 0
    local have
    have=$(dpkg-query -W -f '${Status} ${Package}\n' "${CORE_PACKAGES[@]}" "${VULKAN_PACKAGES[@]}" 2>/dev/null |
        sed -n 's/^install ok installed //p') || true
    printf '%s\n' "${CORE_PACKAGES[@]}" "${VULKAN_PACKAGES[@]}" | grep -vxF -e "$have" || true
}

done_before() {
    [[ -f $STAMP && -x .venv/bin/mimo-vk ]] && "$PY" -c '' 2>/dev/null && [[ $(stamp_now) == "$(<"$STAMP")" ]]
}

# Installs packages as root, or through a sudo that asks nothing; fails where neither is to be had.
apt_install() {
    local as_root=()
    command -v apt-get >/dev/null || return 1
    ((EUID == 0)) || as_root=(sudo -n)
    ((EUID == 0)) || sudo -n true 2>/dev/null || return 1
    say "installing $*"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive sh -ec \
        'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null' sh "$@"
}

system_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    ((${#missing[@]} == 0)) || apt_install "${missing[@]}" ||
        say "not installed, to be pasted once: sudo apt-get install -y ${missing[*]}"
}

# For the web page's tests. Ubuntu's package of this name needs snap: a Google Chrome does as well.
browser() {
    local name
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$name" >/dev/null; then return; fi
    done
    apt_install chromium || say "no browser for the web page's tests, to be pasted once: sudo apt-get install -y chromium"
}

# The first Python that numba has a build for, and that can make a virtual environment.
usable_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

# Ubuntu 22.04's own python3 is older, but it has a newer one beside it.
find_python() {
    usable_python && return
    apt_install python3.11 python3.11-venv python3.11-dev && usable_python && return
    die "needs Python 3.11 to 3.14 with its venv module: sudo apt-get install -y python3 python3-venv"
}

# Keeps an environment that works; makes a new one where there is none or where it is broken.
environment() {
    if "$PY" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null &&
        "$PY" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python=$(find_python)
    [[ ! -e .venv ]] || say "the environment in .venv is broken and is made anew"
    rm -rf .venv
    "$python" -m venv .venv
}

# Twice quiet: errors only.
pip_install() { "$PY" -m pip install -qq --disable-pip-version-check "$@"; }

wheel_cache() {
    local base=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}} tag
    tag=$("$PY" -c 'import sys, platform; print(f"{sys.implementation.cache_tag}-{platform.machine()}")')
    if [[ -z $base ]] || ! mkdir -p "$base/mimo-vk" 2>/dev/null || [[ ! -w $base/mimo-vk ]]; then
        base=$ROOT/.cache
    fi
    echo "$base/mimo-vk/wheels/kp-$KP_VERSION-$KP_RECIPE-$tag"
}

kp_works() { "$PY" -c 'import kp; kp.Manager' >/dev/null 2>&1; }

# Every switch is needed: without the first four the build clones repositories, and without the fifth kp turns the validation
# layer on by itself wherever that is installed. kp's setup.py loses the interpreter on its way to CMake, which would then
# take whichever Python it finds first: a toolchain file names it. Under numpy 2 a kp built with a pybind11 older than 2.12,
# such as Debian 12's, reads arrays wrong without an error.
# With a source archive it builds from that and with the pybind11 that is installed, and asks no index for anything.
build_kp() {
    local into=$1 archive=${2:-} scratch pybind11 from=(--no-binary kp "kp==$KP_VERSION")
    scratch=$(mktemp -d)
    if [[ -n $archive ]]; then
        from=(--no-index --no-build-isolation "$archive")
    else
        pip_install --target "$scratch/pybind11" "pybind11>=2.13,<4" || return 1
    fi
    printf 'set(PYTHON_EXECUTABLE "%s" CACHE FILEPATH "")\n' "$PY" >"$scratch/python.cmake"
    pybind11=$(PYTHONPATH=$scratch/pybind11 "$PY" -m pybind11 --cmakedir 2>/dev/null) || true # else CMake looks for it
    pybind11_DIR=$pybind11 CMAKE_TOOLCHAIN_FILE=$scratch/python.cmake KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER=OFF KOMPUTE_OPT_USE_BUILT_IN_FMT=OFF \
        KOMPUTE_OPT_USE_BUILT_IN_PYBIND11=OFF KOMPUTE_OPT_INSTALL=OFF KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS=ON \
        "$PY" -m pip wheel --disable-pip-version-check --no-deps --no-cache-dir -w "$scratch" "${from[@]}" \
        >"$scratch/log" 2>&1 || { mkdir -p .cache && cp "$scratch/log" .cache/kp-build.log; rm -rf "$scratch"; return 1; }
    mkdir -p "$into" && mv "$scratch"/kp-*.whl "$into/"
    rm -rf "$scratch"
}

# kp from the cached wheel, else from source. Without it everything runs on the CPU.
install_kp() {
    local cache try made_by=.venv/kp-recipe # a kp that an older recipe built may read arrays wrong under a newer numpy
    [[ -f $made_by && $(<"$made_by") == "$KP_RECIPE" ]] && kp_works && return
    cache=$(wheel_cache)
    for try in cached built; do
        if [[ $try == built ]]; then
            rm -rf "$cache" # a wheel that is there but does not load was built against libraries since replaced
            say "building kp $KP_VERSION from source (a minute or two, once)"
            build_kp "$cache" || break
        fi
        compgen -G "$cache/kp-*.whl" >/dev/null || continue
        if pip_install --no-deps --force-reinstall "$cache"/kp-*.whl && kp_works; then
            echo "$KP_RECIPE" >"$made_by"
            rm -f .cache/kp-build.log
            return
        fi
    done
    "$PY" -m pip uninstall --quiet --yes kp >/dev/null 2>&1 || true
    say "kp could not be built (.cache/kp-build.log): everything runs on the CPU, without Vulkan"
}

# kp from a file, a wheel or a source archive, on a machine without a network. SETUP_PYTHON is the Python that gets it.
kp_from() {
    local file=$1 scratch
    PY=${SETUP_PYTHON:-$PY}
    scratch=$(mktemp -d)
    if [[ $file == *.whl ]]; then cp "$file" "$scratch/"; else build_kp "$scratch" "$file" || die "kp: see .cache/kp-build.log"; fi
    pip_install --no-deps --no-index --force-reinstall "$scratch"/kp-*.whl
    rm -rf "$scratch"
    kp_works || die "kp is installed and does not load: libvulkan1 and libfmt must be there"
}

# --dev adds what tests and checks need. --kp FILE installs kp alone, from that file. --stamp prints what this tree's stamp would
# be and --check tells by its status whether set-up is complete; neither changes a thing.
main() {
    local project=. stamp
    if [[ ${1:-} == --dev ]]; then
        project=".[dev]" STAMP+=-dev
        shift
    fi
    case ${1:-} in
    --stamp) stamp_now >&8 && return ;;
    --kp) kp_from "$(realpath "${2:?a wheel or a source archive of kp}")" && return ;;
    --check) if done_before; then return 0; else return 1; fi ;;
    esac
    done_before && return
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9
    done_before && return
    rm -f "$ROOT"/.venv/setup-stamp*
    system_packages
    environment
    say "installing the project into .venv"
    pip_install "setuptools>=77,<83"
    pip_install --no-build-isolation --editable "$project"
    install_kp
    [[ $project == . ]] || browser
    stamp_now >"$ROOT/.venv/stamp.new"
    for stamp in "$ROOT/.venv/setup-stamp" "$STAMP"; do # set up for tests is set up for use as well
        cp "$ROOT/.venv/stamp.new" "$stamp"
    done
    say "done"
}
main "$@"
