#!/usr/bin/env sh
# Makes sure that Chromium, Node and the npm packages of the browser tests are there; does nothing if
# they are.
#
#     tests/browser/prepare.sh FOLDER     # the packages go into FOLDER/node_modules
set -eu
folder=$1

fail() {
    echo "The browser tests need $1." >&2
    exit 1
}

installed() { # COMMAND PACKAGE...
    command -v "$1" >/dev/null && return
    command=$1
    shift
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "$command: as root, apt-get install $*"
    apt-get -q update >/dev/null || fail "apt-get update"
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@" >/dev/null ||
        fail "apt-get install $*"
}

installed chromium chromium fonts-dejavu-core
installed node nodejs
installed npm npm # which some packages of nodejs bring along

for package in onnxruntime-web@1.30.0 playwright-core@1.65.1 axe-core@4.14.1; do
    name=${package%@*}
    there=$folder/node_modules/$name/package.json
    if ! grep -q "\"version\": \"${package##*@}\"" "$there" 2>/dev/null; then
        npm install --no-audit --no-fund --ignore-scripts --loglevel error --fetch-retries 1 \
            --prefix "$folder" "$package" >/dev/null || fail "the npm package $package"
    fi
done
