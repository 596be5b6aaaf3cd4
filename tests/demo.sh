#!/bin/sh
# usage: demo.sh DS4 MODEL HEAD: plain decoding against speculation on one prompt, margins 3.0 and 0. The three texts must be
# the same; the ratios are of the best of five runs each, taken in turn.
set -eu
ds4=$1 model=$2 head=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
run() { # name, then options
    name=$1
    shift
    "$ds4" -m "$model" -p "In the beginning" -n 128 --temp 0 --stats-json "$dir/$name.$i.json" "$@" >"$dir/$name.txt" 2>"$dir/$name.err" || { cat "$dir/$name.err" >&2; exit 1; }
}
for i in 1 2 3 4 5; do
    run plain
    run margin3 --mtp "$head" --mtp-draft 2 --mtp-margin 3.0
    run margin0 --mtp "$head" --mtp-draft 2 --mtp-margin 0
    for name in margin3 margin0; do
        cmp -s "$dir/plain.txt" "$dir/$name.txt" || { echo "the text with --mtp ($name) is not the plain text" >&2; exit 1; }
    done
done
cat "$dir/plain.txt"
echo
echo "the three outputs are identical"
best() { sed -n 's/.*"generation_tokens_per_s": *\([0-9.]*\).*/\1/p' "$dir/$1".*.json | sort -n | tail -1; }
plain=$(best plain)
for name in plain margin3 margin0; do
    case $name in plain) label="plain" ;; margin3) label="--mtp-draft 2 --mtp-margin 3.0" ;; margin0) label="--mtp-draft 2 --mtp-margin 0" ;; esac
    speed=$(best $name)
    echo "$plain $speed $label" | awk '{s = $3; for (i = 4; i <= NF; i++) s = s " " $i; printf "%-32s %8.1f tokens/s  %5.2f x plain\n", s, $2, $2 / $1}'
done
