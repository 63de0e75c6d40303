#!/usr/bin/env bash
# Packs the build into a Debian package. Called by make deb.
#
#   scripts/packaging/deb.sh BUILD VERSION FOLDER
#
# writes FOLDER/train-gpt_..._amd64.deb. Needs dpkg-dev and binutils. A commit without the tag vVERSION gives a package
# version that sorts before the release, e.g. 0.1.0~git20261122.f9419f7-1. The maintainer is DEBFULLNAME and DEBEMAIL,
# or the user of git's configuration. The same commit gives the same bytes.
# Exit codes: 0; 64 wrong arguments; 66 no build; those of dpkg.
set -euo pipefail
if [ $# != 3 ]; then
    echo "usage: scripts/packaging/deb.sh BUILD VERSION FOLDER" >&2
    exit 64
fi
cd "$(dirname "$0")/../.."
build=$1 version=$2 folder=$3
package=train-gpt
time=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$time}
if [ "$(git describe --tags --exact-match 2> /dev/null)" != "v$version" ]; then
    version+=~git$(date --utc --date="@$time" +%Y%m%d).$(git rev-parse --short=7 HEAD)
fi
version+=-1
maintainer="${DEBFULLNAME:-$(git config user.name || git log -1 --format=%an)} <"
maintainer+="${DEBEMAIL:-$(git config user.email || git log -1 --format=%ae)}>"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/debian/$package
doc=$root/usr/share/doc/$package
install -d -m 755 "$root/DEBIAN"
DOCDIR=share/doc/$package scripts/packaging/install.sh install "$build" /usr "$root"
rm "$root/usr/share/train_gpt/installed_files" "$doc/LICENSE" "$root/usr/share/train_gpt/gpt2/LICENSE"
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$root"/usr/bin/train_gpt_cpu

# Prints a license in the format of a Debian copyright file: indented, with dots for empty lines.
license_text() { tail -n +5 "$1" | sed 's/^$/./; s/^/ /'; }
{
    echo "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
    echo "Upstream-Name: train_gpt"
    printf '\nFiles: *\nCopyright: the train_gpt authors\nLicense: Expat\n'
    license_text LICENSE
    printf '\nFiles: usr/share/train_gpt/gpt2/*\nCopyright: 2019 OpenAI\nLicense: modified-MIT\n'
    license_text data/gpt2/LICENSE
} > "$doc/copyright"
{
    printf '%s (%s) unstable; urgency=medium\n\n' "$package" "$version"
    printf '  * Packaged by make deb; see changelog.gz for the changes.\n\n'
    printf ' -- %s  %s\n' "$maintainer" "$(date --utc --rfc-email --date="@$time")"
} > "$doc/changelog.Debian"
mv "$doc/CHANGELOG.md" "$doc/changelog"
gzip -9n "$doc/changelog" "$doc/changelog.Debian"
chmod 644 "$doc"/*.gz "$doc/copyright"

printf 'Source: %s\nMaintainer: %s\n\nPackage: %s\nArchitecture: amd64\n' \
    "$package" "$maintainer" "$package" > "$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O "debian/$package/usr/bin/train_gpt_cpu")
cat > "$root/DEBIAN/control" << CONTROL
Package: $package
Version: $version
Architecture: amd64
Maintainer: $maintainer
Installed-Size: $(du -sk --apparent-size "$root/usr" | cut -f1)
Depends: ${depends#shlibs:Depends=}
Recommends: openmpi-bin
Suggests: curl, jq
Section: science
Priority: optional
Description: trainer of GPT-class language models
 train_gpt pretrains GPT-class language models from scratch. It is one program
 without a framework and without Python: text to tokenizer and token shards,
 training on one or several ranks that resumes bit for bit, samples, evaluation
 and export to Hugging Face's format.
 .
 This package has the trainer for CPUs, train_gpt_cpu, compiled for x86-64-v3:
 it needs a CPU with AVX2 and FMA. Several ranks need openmpi-bin.
CONTROL
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum > DEBIAN/md5sums)
find "$root" -exec touch --no-dereference --date="@$time" {} +
mkdir -p "$folder"
dpkg-deb --root-owner-group --build "$root" "$folder/${package}_${version}_amd64.deb"
