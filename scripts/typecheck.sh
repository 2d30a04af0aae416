#!/usr/bin/env bash
# mypy over the packages under their import names: type checkers do not follow the editable install's mapping, so a
# git-ignored folder of links lays the sources out the way they are imported.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
mkdir -p .typecheck/headsmith
for name in heads training inference recipes scripts; do
    ln -sfn "../../$name" ".typecheck/headsmith/$name"
done
exec "${1:-python}" -m mypy -p headsmith
