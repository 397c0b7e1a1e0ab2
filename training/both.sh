#!/bin/bash
# Train and measure both models at once, one GPU each where there are two: training/both.sh OUT [options of train.py]
# CONTINUE=1 starts from checkpoints/. Leaves per model: the shards, log.jsonl, results.json.
export PYTHONUNBUFFERED=1
out=$1; shift
last=$(( $(nvidia-smi -L 2>/dev/null | wc -l) - 1 ))

one() {  # training name, checkpoint name, gpu, options
    local model=$1 folder=checkpoints/$2; export CUDA_VISIBLE_DEVICES=$3; shift 3
    mkdir -p $out/$model /tmp/measure/$model
    python3 training/train.py --model $model --out $out/$model ${CONTINUE:+--start $folder} "$@" > /tmp/measure/$model.txt 2>&1
    cp $folder/*.json checkpoints/prompts.jsonl /tmp/measure/$model/
    cp checkpoints/prompts.jsonl /tmp/measure/
    ln -sf $(realpath $out)/$model/model-*.safetensors /tmp/measure/$model/
    python3 training/evaluate.py /tmp/measure/$model --save $out/$model/results.json $EVALUATE >> /tmp/measure/$model.txt 2>&1
}
one m3 demo 0 "$@" & one dsa demo-dsa $last "$@" & wait
for model in m3 dsa; do echo "== $model"; grep -v -i warn /tmp/measure/$model.txt | cut -c1-420 | tail -${LINES_SHOWN:-48}; done
