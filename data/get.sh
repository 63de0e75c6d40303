#!/usr/bin/env bash
# Downloads a public data set: token shards, text for `prepare`, or an evaluation. Without a name, lists the data sets.
#
#   data/get.sh [NAME [--shards N] [--out DIR] [--verify] [--tries N] [--endpoint URL]]
#
# Each file is downloaded as FILE.part, checked against the size and SHA-256 that the server publishes (GitHub files:
# against the values below), and renamed. A partial download is resumed. A file that fails the check is kept as
# FILE.mismatch. DIR/lock prevents concurrent runs; DIR/.files caches the server's file list.
# Requires bash, curl, jq, flock and coreutils; `scripts/setup.sh data` installs them.
#
# Exit codes, as in kernels/base/check.h: 0; 64 invalid arguments; 65 a file does not match its published size or
# SHA-256; 66 the server does not have the file, or a command is missing; 73 DIR cannot be used; 74 the network or the
# disk failed; 75 stopped by a signal. After 74 and 75, run the same command again to resume.
set -euo pipefail
export LC_ALL=C

names=(tinyshakespeare tinystories openwebtext fineweb10B finewebedu10B hellaswag)

# Sets the properties of a data set. `files`: a regular expression for the paths on Hugging Face, or one file on GitHub
# with its size in bytes and SHA-256. `next`: the commands to run next, with the placeholders DIR and CONFIGS. `size`
# and `tokens` (counted with GPT-2's tokenizer) are only listed.
look_up() {
    host=huggingface.co folder=datasets/$1 by_hand='' next=() length='' sha256=''
    case $1 in
        tinyshakespeare)
            about='plays, one text file' license='public domain' size='1.1 MB' tokens='0.3 M' length=1115394
            host=raw.githubusercontent.com folder=datasets/text/$1
            repository=karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e
            files=data/tinyshakespeare/input.txt
            sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
            next=("prepare DIR/input.txt --out datasets/$1" "datasets/$1/config.json") ;;
        tinystories)
            about='children'\''s stories, Parquet' license=CDLA-Sharing-1.0 size='1.0 GB' tokens='0.5 B'
            folder=datasets/text/$1 repository=roneneldan/TinyStories
            files='data/(train|validation)-[0-9]{5}-of-[0-9]{5}(-[0-9a-f]+)?\.parquet'
            next=("prepare DIR/*.parquet --val-fraction 0.01 --out datasets/$1" "datasets/$1/config.json") ;;
        openwebtext)
            about='web pages, Parquet' license=CC0-1.0 size='24 GB' tokens='9 B'
            folder=datasets/text/$1 repository=Skylion007/openwebtext
            files='plain_text/train-[0-9]{5}-of-[0-9]{5}\.parquet'
            next=("prepare DIR/*.parquet --tokenizer gpt2 --val-fraction 0.0005 --out datasets/$1"
                  "datasets/$1/config.json") ;;
        fineweb10B) about='web pages, token shards' size='20.7 GB' last=000103 ;;
        finewebedu10B) about='educational web pages, token shards' size='19.9 GB' last=000099 ;;
        hellaswag)
            about='10,042 multiple-choice questions, JSONL' license=MIT size='12 MB' tokens=-
            host=raw.githubusercontent.com length=12246618
            repository=rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57
            files=data/hellaswag_val.jsonl
            sha256=0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588
            next=("eval RUN --questions DIR/hellaswag_val.jsonl") ;;
        *) return 1 ;;
    esac
    if [[ $1 = fineweb* ]]; then
        local stem=${1%10B}
        license='ODC-By 1.0' tokens='10 B' repository=kjj0/$1-gpt2 files="${stem}_(train|val)_[0-9]{6}\.bin"
        by_hand="${stem}_val_000000.bin and ${stem}_train_000001.bin to $last.bin, 200 MB each"
        next=("CONFIGS/gpt2_124M.json --set data.train='DIR/${stem}_train_*.bin'")
        next[0]+=" --set data.val='DIR/${stem}_val_*.bin'"
    fi
}

list() {
    local name
    echo "usage: $0 NAME [--shards N] [--out DIR] [--verify] [--tries N] [--endpoint URL]"
    printf '\n%-16s  %-8s  %-6s  %-16s  %s\n' NAME download tokens license content
    for name in "${names[@]}"; do
        look_up "$name"
        printf '%-16s  %8s  %6s  %-16s  %s\n' "$name" "$size" "$tokens" "$license" "$about"
    done
    cat << 'END'

--shards N      download only the first N training files (a token shard has 100 M tokens) and all other files
--out DIR       output directory (default: datasets/NAME, or datasets/text/NAME for text)
--verify        check the SHA-256 of existing files, not only their size
--tries N       give up after N consecutive failures without progress (default: 8)
--endpoint URL  download from a mirror with the same paths, for example https://hf-mirror.com

A repeated call resumes partial downloads and fetches missing files. At the end it prints the next command. Token shards
are ready for training; text needs `prepare`. Tokens are counted with GPT-2's tokenizer. The license is the one that
the publisher states; web pages belong to their authors.
END
}

say() { printf '%s\n' "$*"; }

# die CODE LINE...
die() {
    local code=$1
    shift
    printf 'get: %s\n' "$@" >&2
    exit "$code"
}

usage() { die 64 "$1" "run $0 without arguments to list the data sets and options"; }

[ $# != 0 ] || { list; exit; }
again=$(printf ' %q' "$0" "$@")
name='' shards='' out='' verify='' most_tries=8 endpoint=''
while [ $# != 0 ]; do
    case $1 in
        -h | --help) list; exit ;;
        --verify) verify=yes; shift; continue ;;
        --shards | --out | --tries | --endpoint) [ -n "${2-}" ] || usage "$1 requires a value" ;;
        -*) usage "unknown option $1" ;;
        *) [ -z "$name" ] || usage "only one data set can be downloaded at a time: $name or $1"
           name=$1; shift; continue ;;
    esac
    case $1 in
        --shards) shards=$2 ;;
        --out) out=$2 ;;
        --tries) most_tries=$2 ;;
        --endpoint) endpoint=${2%/} ;;
    esac
    shift 2
done
[ -n "$name" ] || usage 'the name of the data set is missing'
look_up "$name" || usage "unknown data set '$name'; available: ${names[*]}"
for number in "${shards:-1}" "$most_tries"; do
    [[ $number =~ ^[1-9][0-9]{0,5}$ ]] || usage "$number is not an integer from 1 to 999999"
done
[ -z "$endpoint" ] || [[ $endpoint =~ ^https?://[^/] ]] || usage "--endpoint $endpoint must begin with https://"
for command in curl jq flock; do
    command -v "$command" > /dev/null || die 66 "$command is not installed; run scripts/setup.sh data (or apt-get)"
done
[ -n "$endpoint" ] || endpoint=https://$host
host=${endpoint#*://}
out=${out:-$folder}
out=${out%/}

human() { numfmt --to=si --round=nearest --format=%.1f "$1" | sed -E 's/[KMGTP]?$/ &B/; s/K/k/'; }
bytes() { stat -c %s "$1" 2> /dev/null || echo 0; }

# Describes the content of a file for an error message.
content() {
    local head
    head=$(head -c 300 "$1" | tr -d '\0')
    case ${head,,} in
        '') echo 'is empty' ;;
        *'<!doctype html'* | *'<html'*) echo 'is an HTML page, possibly from a proxy or a login' ;;
        'version https://git-lfs'*) echo 'is a Git LFS pointer, not the file itself' ;;
        *) echo 'has different content' ;;
    esac
}

child=''
stop() {
    if [ -n "$child" ]; then
        kill "$child" 2> /dev/null || true
        wait "$child" 2> /dev/null || true
    fi
    [ ! -t 1 ] || echo
    die 75 'stopped; partial downloads are kept. To resume, run the same command again:' "$again"
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap stop INT TERM HUP

# On a terminal, shows the progress of a transfer in one line: bytes, rate, time left.
show_progress() {
    local file=$1 begin now total=${2:-0} start=$SECONDS rate line
    begin=$(bytes "$file")
    while kill -0 "$child" 2> /dev/null; do
        if [ -t 1 ] && [ "$total" != 0 ] && [ "$SECONDS" != "$start" ]; then
            now=$(bytes "$file")
            rate=$(((now - begin) / (SECONDS - start)))
            line="$(human "$now") of $(human "$total"), $(human "$rate")/s"
            [ "$rate" = 0 ] || line+=", $(((total - now) / rate)) s left"
            printf '\r\033[K    %s' "$line"
        fi
        sleep 0.3
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

# request URL FILE OPTION...: sends one request. Sets `http` to the last status or 000, and `error` to curl's message.
# Returns curl's exit code. Times out after a minute without data.
request() {
    local url=$1 file=$2 code=0
    shift 2
    : > "$work/headers"
    curl --silent --show-error --fail --location --connect-timeout 20 --speed-limit 1 --speed-time 60 \
        --dump-header "$work/headers" --write-out '%{http_code}' --output "$file" "$@" -- "$url" \
        > "$work/http" 2> "$work/error" &
    child=$!
    [ ! -t 1 ] || show_progress "$file" "${expected:-0}"
    wait "$child" || code=$?
    child=''
    http=$(cat "$work/http") error=$(tail -n 1 "$work/error")
    return "$code"
}

# Prints the value of a header in the last response after redirects.
header() { sed -nE "s/^$1:[ \t]*(.*[^ \t\r])[ \t\r]*$/\1/ip" "$work/headers" | tail -n 1; }

# Prints the wait in seconds that the server requests: Retry-After (number or date) or Hugging Face's RateLimit (t=...).
asked_wait() {
    local value
    value=$(header retry-after)
    if [[ $value =~ ^[0-9]+$ ]]; then
        echo "$value"
    elif [ -n "$value" ] && value=$(date -d "$value" +%s 2> /dev/null); then
        echo $((value > EPOCHSECONDS ? value - EPOCHSECONDS : 0))
    elif [[ $(header ratelimit) =~ \;[\ ]*t=([0-9]+) ]]; then
        echo "${BASH_REMATCH[1]}"
    fi
}

reached=''  # nonempty once the server has answered
# transfer URL FILE OPTION...: repeats the request until it succeeds. Sets `error` and returns 1 if the network fails.
transfer() {
    local url=$1 file=$2 tries=0 wait_s=1 before code asked
    while true; do
        before=$(bytes "$file") code=0
        request "$@" || code=$?
        [ "$http" = 000 ] || reached=yes
        [ "$code" != 0 ] || return 0
        case $code:$http in
            22:404 | 22:410) die 66 "$host does not have $url ($error)" ;;
            22:401 | 22:403 | 22:451) die 66 "$host denies access to $url ($error)" ;;
            60:*) die 74 "cannot verify the certificate of $host: $error" \
                      'Possible causes: the package ca-certificates is missing (scripts/setup.sh data), or a proxy.' ;;
            23:*) die 74 "cannot write $file: $error; is the disk full?" ;;
            33:* | 22:416)
                if [[ $(header content-type) = text/html* ]]; then
                    die 65 "$host sent an HTML page instead of ${file##*/}, possibly from a proxy or a login"
                fi
                say "    $host cannot resume a transfer: restarting from byte 0"
                rm -f "$file" ;;
        esac
        [ "$(bytes "$file")" -le "$before" ] || tries=0 wait_s=1
        tries=$((tries + 1))
        # If the server has never answered, fail after two tries: more waiting does not help.
        [ "$tries" -lt "$most_tries" ] && { [ -n "$reached" ] || [ "$tries" -lt 2 ]; } || return 1
        asked=''
        case $http in 429 | 503) asked=$(asked_wait) ;; esac
        if [ "${asked:-0}" -gt 900 ]; then
            error+="; the server requests a wait of $asked s"
            return 1
        fi
        say "    $error; retrying in ${asked:-$wait_s} s"
        sleep "${asked:-$wait_s}" &
        child=$!
        wait "$child"
        child=''
        wait_s=$((wait_s < 32 ? wait_s * 2 : 60))
    done
}

# Exits if the server has never answered.
unreachable() {
    local place=https://huggingface.co/datasets/$repository/tree/main
    [ -z "$sha256" ] || place=https://raw.githubusercontent.com/$repository/$files
    die 74 "cannot reach $host: $error" \
        'For a proxy, set https_proxy=http://HOST:PORT. For a mirror, add --endpoint https://MIRROR.' \
        'Or run the same command on a machine with network access and copy the directory:' \
        "  rsync -a OTHER_MACHINE:$out/ $out/" \
        "The files ($size) are at $place${by_hand:+: $by_hand}"
}

# Writes a line "SIZE SHA256 PATH" to $1 for each file that the server publishes. Returns 1 if the network fails.
published() {
    local list=$1 url page=$work/page
    if [ -n "$sha256" ]; then
        echo "$length $sha256 $files" > "$list"
        return
    fi
    : > "$list"
    url="$endpoint/api/datasets/$repository/tree/main?recursive=true"
    while [ -n "$url" ]; do
        rm -f "$page"
        transfer "$url" "$page" || return 1
        # shellcheck disable=SC2016
        jq -r --arg files "^($files)\$" '.[] | select(.type == "file" and (.path | test($files)))
            | "\(.lfs.size // .size) \(.lfs.oid // "-") \(.path)"' "$page" >> "$list" 2> /dev/null ||
            die 65 "$host did not answer $url with a list of files: the response $(content "$page")"
        url=$(header link)  # the next page of a long list
        if [[ $url =~ \<([^\>]+)\>\;\ *rel=\"?next ]]; then url=${BASH_REMATCH[1]}; else url=''; fi
    done
    [ -s "$list" ] || die 66 "$repository on $host has no file that matches $files (it may have been renamed)"
    if grep -vE '^[0-9]+ [0-9a-f]{64} ' "$list" > "$work/odd"; then
        die 65 "$host publishes no SHA-256 for $(cut -d ' ' -f 3 "$work/odd" | head -n 1)"
    fi
}

# matches FILE SIZE [SHA256]: returns whether the file has this size and SHA-256. Sets `finding` for the message.
matches() {
    local sum
    finding="has $(bytes "$1") bytes instead of $2 and $(content "$1")"
    [ "$(bytes "$1")" = "$2" ] || return 1
    [ -n "${3-}" ] || return 0
    sum=$(sha256sum < "$1")
    finding="has the SHA-256 ${sum%% *} instead of $3 and $(content "$1")"
    [ "${sum%% *}" = "$3" ]
}

set_aside() {
    mv -f -- "$1" "$2.mismatch"
    printf 'get: %s %s; kept as %s\n' "$1" "$finding" "${2##*/}.mismatch" >&2
}

if ! { mkdir -p -- "$out" && : >> "$out/lock"; } 2> "$work/error"; then die 73 "$(tail -n 1 "$work/error")"; fi
exec {lock}>> "$out/lock"
flock -n "$lock" || die 73 "$out is in use by another process: $(head -n 1 "$out/lock") holds $out/lock"
: > "$out/lock"
echo "pid $$, host $(uname -n)" >&"$lock"

if published "$work/files"; then
    mv -f -- "$work/files" "$out/.files"
elif [ -s "$out/.files" ]; then
    say "cannot reach $host ($error); using its file list of $(date -r "$out/.files" +%F)"
else
    unreachable
fi
# Validation files come first, so that training can start while the remaining shards are downloaded.
awk -v most="${shards:-999999}" '/(^|[\/_])train[-_]/ { if (++found <= most) train = train $0 "\n"; next }
    { print } END { printf "%s", train }' "$out/.files" > "$work/wanted"

total=0 missing=0 count=0
pending=()
while read -r expected sum path; do
    file=$out/${path##*/}
    total=$((total + expected)) count=$((count + 1))
    if [ -e "$file" ]; then
        if matches "$file" "$expected" ${verify:+"$sum"}; then continue; fi
        set_aside "$file" "$file"
    fi
    pending+=("$expected $sum $path")
    missing=$((missing + expected - $(bytes "$file.part")))
done < "$work/wanted"
say "$name: $(human "$total") in $count file$([ "$count" = 1 ] || echo s);" \
    "$((count - ${#pending[@]})) already in $out, $(human "$missing") to download"
free=$(df --output=avail -B1 -- "$out" | tail -n 1)
[ "$missing" -le "$free" ] ||
    die 74 "$out has $(human "$free") free, but the download needs $(human "$missing")" \
        'Free some space, download less with --shards N, or use another disk with --out DIR.'

number=0
for row in "${pending[@]}"; do
    read -r expected sum path <<< "$row"
    file=$out/${path##*/} part=$out/${path##*/}.part number=$((number + 1))
    at=$(bytes "$part")
    say "[$number/${#pending[@]}] ${path##*/}, $(human "$expected")$([ "$at" = 0 ] || echo ", from byte $at")"
    if [ "$at" -lt "$expected" ]; then
        resolve=$endpoint/datasets/$repository/resolve/main/$path
        [ -z "$sha256" ] || resolve=$endpoint/$repository/$path
        if ! transfer "$resolve" "$part" --continue-at -; then
            [ -n "$reached" ] || unreachable
            die 74 "$file: $error; $(bytes "$part") of $expected bytes are downloaded. To resume, run again:" "$again"
        fi
    fi
    if ! matches "$part" "$expected" "$sum"; then
        set_aside "$part" "$file"
        die 65 "the file from $host does not match its published SHA-256; run the same command to retry"
    fi
    mv -f -- "$part" "$file"
done
if [ -n "$verify" ]; then say 'all files match their published SHA-256'; fi

# Prints the next commands with paths for the current directory: in the repository, outside it, or installed.
here=$(realpath --relative-base=. -- "$(dirname "$(realpath -- "$0")")")
configs=$here/configs program=train_gpt_cpu built=''
if [ -e "$here/../Makefile" ]; then
    root=$(realpath --relative-base=. -- "$here/..")/
    root=${root#./} configs=${root}configs built=${root}build/ program=${built}train_gpt_cpu
fi
[ ${#next[@]} = 0 ] || say next:
for line in "${next[@]}"; do
    if [[ $line = CONFIGS/* ]]; then
        if command -v "${built}train_gpt" > /dev/null; then program=${built}train_gpt; fi
        # The configuration already names the default directory of this data set.
        [ "$name $out" != 'fineweb10B datasets/fineweb10B' ] || line=${line%% *}
    fi
    line=${line//DIR/$out}
    say "  $program ${line//CONFIGS/$configs}"
done
