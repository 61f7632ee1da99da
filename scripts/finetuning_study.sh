#!/usr/bin/env bash
# The study of fine-tuning (results/finetuning/plan.md), from text to report: scripts/finetuning_study.sh
# It goes on where it stopped, with two runs in parallel. LIBREOFFICE is the archive of translations, MULTI30K the
# folder of its text; BLOCKS are the seeds, 1 to 8. A block is complete when the script says so: commit results/ then.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh scripts/...`, where sh is another shell
set -euo pipefail
export scripts DATA_DIR=${DATA_DIR:-data} RUN_DIR=${RUN_DIR:-runs} RESULTS_DIR=${RESULTS_DIR:-results}
scripts=$(dirname "$(readlink -f "$0")")
export PATH=$scripts/../.venv/bin:$PATH  # for smoe
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # of each of the two runs
export text=$DATA_DIR/finetuning-text rates=$RESULTS_DIR/finetuning-rates
parts=(finetuning-known-20000 finetuning-new-20000 finetuning-known-2000 finetuning-new-2000)  # the longest first

# The text: labels and help of LibreOffice, Multi30k in lower case.
mkdir -p "$text/wu" "$RESULTS_DIR/finetuning-start"
if [[ ! -e $text/help.tar ]]; then
    mkdir -p "$text/unpacked"
    tar -xf "${LIBREOFFICE:?is the archive of translations}" -C "$text/unpacked"
    tar -cf "$text/labels.tar" -C "$text/unpacked" --exclude=helpcontent2 .
    (cd "$text/unpacked" && find . -path '*/helpcontent2/*' -name '*.po' -print0) |
        tar -cf "$text/help.part" -C "$text/unpacked" --null -T -
    mv "$text/help.part" "$text/help.tar"
    rm -r "$text/unpacked"
fi
for file in "${MULTI30K:?is the folder of its text}"/*.{en,de}.gz; do
    name=$(basename "$file" .gz)
    [[ -e $text/wu/$name ]] && continue
    zcat "$file" | LC_ALL=C.UTF-8 sed 's/.*/\L&/' > "$text/$name.part"
    mv "$text/$name.part" "$text/wu/$name"
done
"$scripts/prepare.sh" multi30k-wu --raw "$text/wu"
"$scripts/prepare.sh" finetuning-start --raw "$text/labels.tar"
"$scripts/prepare.sh" finetuning-help --raw "$text/help.tar"

# The known number, beside all that comes before the blocks.
"$scripts/study.sh" multi30k-wu dense --jobs 1 &
known=$!
trap 'kill $known 2> /dev/null || true' EXIT

# The start is kept in results/: another kind of processor rounds otherwise, and would train another one.
start=$RESULTS_DIR/finetuning-start/model
if [[ ! -e $start ]]; then
    "$scripts/study.sh" finetuning-start dense --jobs 1
    smoe export "$RUN_DIR/finetuning-start/dense" --to huggingface --fp16 --output "$start"
fi

# The parts: training pairs in random order, of which the small sets have the first, and the start's own tests.
for part in "${parts[@]}"; do
    pair=en-ca folder=$text/$part help=$DATA_DIR/finetuning-help/raw
    [[ $part == *-new-* ]] && pair=en-sl
    mkdir -p "$folder"
    paste "$help/train.$pair.en" "$help/train.$pair.${pair#en-}" | shuf --random-source=<(yes) > "$text/$pair.tsv"
    head -n "${part##*-}" "$text/$pair.tsv" | cut -f1 > "$folder/train.$pair.en"
    head -n "${part##*-}" "$text/$pair.tsv" | cut -f2 > "$folder/train.$pair.${pair#en-}"
    cp "$help"/{valid,test}."$pair".* "$folder"
    for kept in nb id cy nso; do
        for language in en $kept; do
            head -n 100 "$DATA_DIR/finetuning-start/raw/test.en-$kept.$language" > "$folder/test.en-$kept.$language"
        done
    done
    PRETRAINED=$start "$scripts/prepare.sh" "$part" --raw "$folder"
done

# Learning rates, with seed 0: for each task and system the one with the lowest validation loss on 20,000 pairs.
for rate in 0.001 0.003; do
    [[ " ${BLOCKS:=1 2 3 4 5 6 7 8} " == *" 1 "* ]] || break  # before the first block
    printf '%s\n' "${parts[@]:0:2}" | RUN_DIR=$RUN_DIR/finetuning-rates/$rate RESULTS_DIR=$rates/$rate \
        xargs -P 2 -I{} "$scripts/study.sh" {} --lr "$rate" --seeds 0 --jobs 1
done
best() {  # PART METHOD
    awk -F, 'FNR > 1 && $3 != "" && (low == "" || $3 < low) { low = $3 + 0; file = FILENAME }
        END { split(substr(file, 1 + length(ENVIRON["rates"] "/")), at, "/"); print at[1] }' \
        "$rates"/*/"${1%-*}-20000/$2.seed-0/curve.csv"
}
block() {  # PART SEED
    for method in smoe-4-4 moe dense-longer dense; do
        "$scripts/study.sh" "$1" $method --lr "$(best "$1" $method)" --seeds "$2" --jobs 1
    done
    [[ $2 != 1 ]] || "$scripts/study.sh" "$1" smoe-scratch-4-4 --seeds 1 --jobs 1
}
export -f best block

wait $known
for seed in $BLOCKS; do
    printf '%s\n' "${parts[@]}" | xargs -P 2 -I{} bash -euc "block {} $seed"
    "$scripts/report.sh" finetuning
    echo "# block $seed is complete: commit $RESULTS_DIR"
done
"$scripts/study.sh" multi30k-wu moe smoe-4-4 --jobs 2
