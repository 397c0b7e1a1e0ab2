#!/bin/bash
# Both models at once, one GPU each where there are two: training/both.sh OUT [options of train.py]
export PYTHONUNBUFFERED=1
out=$1; shift
last=$(( $(nvidia-smi -L | wc -l) - 1 ))
CUDA_VISIBLE_DEVICES=0 timeout ${LIMIT:-590} python3 training/train.py --model m3 --out $out/m3 "$@" > $out/m3.txt 2>&1 &
CUDA_VISIBLE_DEVICES=$last timeout ${LIMIT:-590} python3 training/train.py --model dsa --out $out/dsa "$@" > $out/dsa.txt 2>&1 &
wait
