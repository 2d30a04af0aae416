#!/usr/bin/env bash
# From a fresh machine to trained draft heads for the embedded target and a measured speed-up.
#
#   bash scripts/quickstart.sh                 within 20 minutes on 2 cores, installation included
#   bash scripts/quickstart.sh --minutes 60    trains EAGLE-3 longer
#
# Steps that are done are not done again: answers resume, finished heads are kept. Remove runs/quickstart to start anew.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
source scripts/environment.sh

MINUTES=4
while [ $# -gt 0 ]; do
    case $1 in
        --minutes) MINUTES=${2:?"--minutes needs a number"}; shift 2 ;;
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) fail "unknown argument $1" "usage: bash scripts/quickstart.sh [--minutes N]" ;;
    esac
done
START=$SECONDS
RUN=runs/quickstart
ANSWERS=$RUN/answers.jsonl
HEADSMITH=$VENV/bin/headsmith
TARGET=smollm2-135m-instruct

make_environment ""
export TOKENIZERS_PARALLELISM=false

say "1/4 the target answers 570 prompts of its own (5 minutes at most; the 30 questions measured later are not among them)"
if [ -f "$RUN/answers.done" ]; then
    echo "$ANSWERS is finished"
else
    "$HEADSMITH" generate smollm2-135m-eagle3 "output_dir=$RUN" "generate.output=$ANSWERS" generate.minutes=5 generate.batch=64
    touch "$RUN/answers.done" # further answers would be other training data for a run that is resumed
fi

train() { # train METHOD MINUTES: a run that is finished is kept, an interrupted one goes on
    local folder=$RUN/$1-$2min
    if [ -f "$folder/evaluation.json" ]; then
        echo "$folder is finished"
        return
    fi
    "$VENV/bin/accelerate" launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
        -m headsmith.training.train "smollm2-135m-$1" "output_dir=$folder" "data.train=$ANSWERS" \
        "train.minutes=$2" train.features=memory resume=true
}
say "2/4 Medusa heads, 2 minutes"
train medusa 2
say "3/4 an EAGLE-3 drafter, $MINUTES minutes"
train eagle3 "$MINUTES"

say "4/4 measuring: 12 held-out questions, every method on each in turn"
"$HEADSMITH" bench --target "$TARGET" --dtype bfloat16 --heads "$RUN/medusa-2min" --heads "$RUN/eagle3-${MINUTES}min" \
    --questions questions --limit 12 --new-tokens 64 --json "$RUN/bench.json"
say "a sample answer"
"$HEADSMITH" decode --target "$TARGET" --dtype bfloat16 --heads "$RUN/eagle3-${MINUTES}min" --stats --new-tokens 96 \
    --prompt "Explain in three sentences why the sky is blue."
say "done in $(((SECONDS - START + 59) / 60)) minutes. Heads: $RUN/medusa-2min/heads and $RUN/eagle3-${MINUTES}min/heads; figures: $RUN/bench.json"
