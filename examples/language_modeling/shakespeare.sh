#!/usr/bin/env bash
# Character-level language models with memory: prepare, train, and score by length of memory.
#
#   bash examples/language_modeling/shakespeare.sh TEXT OUT [MODEL...]
#
# TEXT is a plain text file (.gz too), of which the first 90 % are trained on, 5 % are valid and 5 %
# test. MODELs: a position scheme, trained with memory as relpos_transformer_xl (default:
# transformer_xl alibi t5 m4), or lm: relpos_transformer_lm with transformer_xl's positions, the same
# parameters and no memory. Whatever is finished is not done again; an interrupted training goes on.
# UPDATES=N trains for longer than 600 updates (some five minutes each on one idle core).
set -euo pipefail
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # several trainings at once share the cores

text=${1:?usage: shakespeare.sh TEXT OUT [MODEL...]} out=${2:?usage: shakespeare.sh TEXT OUT [MODEL...]}
shift 2
[ $# -gt 0 ] || set -- transformer_xl alibi t5 m4 lm
user_dir=$(python -m relpos_fairseq.cli path)
updates=${UPDATES:-600}

python -m relpos_fairseq.cli prepare lm --text "$text" --shares 0.9,0.05,0.05 --level char --out "$out/data"

for model in "$@"; do
    if [ "$model" = lm ]; then
        architecture=(--arch relpos_transformer_lm --position-scheme transformer_xl)
        scored=()
    else
        architecture=(--arch relpos_transformer_xl --position-scheme "$model" --mem-len 128)
        scored=(--mem-len 0,64,128,256,512,1024)
    fi
    save=$out/$model-$updates
    if [ ! -e "$save/finished" ]; then
        fairseq-train "$out/data" --user-dir "$user_dir" "${architecture[@]}" \
            --task segment_language_modeling --tokens-per-sample 64 --batch-size 24 --batch-size-valid 8 \
            --decoder-layers 3 --decoder-embed-dim 128 --decoder-ffn-embed-dim 384 \
            --decoder-attention-heads 4 --dropout 0.1 \
            --criterion relpos_cross_entropy --optimizer relpos_adam --adam-betas '(0.9, 0.98)' --clip-norm 0.25 \
            --lr 2e-3 --lr-scheduler cosine --warmup-updates 60 --max-update "$updates" --seed 1 \
            --cpu --num-workers 0 --no-progress-bar --log-interval 25 --distributed-world-size 1 \
            --save-dir "$save" --save-interval-updates 100 --keep-interval-updates 1 \
            --no-epoch-checkpoints
        touch "$save/finished"
    fi
    python -m relpos_fairseq.cli evaluate length "$save/checkpoint_last.pt" --data "$out/data" --split test \
        --tokens 20000 --lengths 32,64,128,256,512 "${scored[@]}" --out "$save/length"
done
