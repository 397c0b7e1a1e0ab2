#!/bin/bash
# Generate texts and train both draft heads at once, one GPU each where there are two: training/heads.sh OUT SECONDS ROWS
# EAGLE3 and DFLASH hold further options of train_heads.py, DATA another data folder, SEED the first of the two seeds of the texts.
# Leaves in OUT: the folders eagle3 and dflash.
export PYTHONUNBUFFERED=1
out=$1 seconds=$2 rows=$3 data=${DATA:-training/.data} seed=${SEED:-1}
texts=/tmp/rollouts; mkdir -p $texts $out
for file in train.bin draft_prompts.npz; do [ -f $data/$file ] || xz -dk $data/$file.xz; done
last=$(( $(nvidia-smi -L 2>/dev/null | wc -l) - 1 ))

texts_on() {  # gpu, seed, part
    CUDA_VISIBLE_DEVICES=$1 python3 training/rollout.py --data $data --rows $rows --seed $2 --out $texts/part$3.npz > $texts/log$3.txt 2>&1
}
head_on() {  # head, gpu, options
    local head=$1; export CUDA_VISIBLE_DEVICES=$2; shift 2
    python3 training/train_heads.py --head $head --data $data --rollouts $texts/part?.npz --out $out/$head --seconds $seconds --compile "$@" > $texts/$head.txt 2>&1
}
texts_on 0 $seed 1 & texts_on $last $((seed + 1)) 2 & wait; tail -n 3 $texts/log?.txt
head_on eagle3 0 $EAGLE3 & head_on dflash $last $DFLASH & wait
for head in eagle3 dflash; do echo "== $head"; grep -v -i warn $texts/$head.txt | cut -c1-420 | tail -n ${LINES_SHOWN:-20}; done
