"""Writes docs/equivalence.md: the worst difference from one process, measured, per strategy, model and process count.

python tests/equivalence/figures.py docs/equivalence.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from harness import spawn
from test_same_training import EIGHT, FOUR, STEPS, TOLERANCE, TWO, VARIANTS, worst_difference

ASYNCHRONOUS = ["pipedream", "pipedream-vsync", "pipedream-2bw"]

HEAD = f"""# Same training, proven

Worst relative difference between the parallel run and one process after {STEPS} steps in float64, over the losses of
all steps and every parameter (largest difference over largest entry). Momentum SGD, gradients clipped at 0.5
(PipeDream: not clipped), dropout off, deterministic kernels, global batch 16. The tests hold every figure to
{TOLERANCE:.0e}, with AdamW too. Written by `python tests/equivalence/figures.py docs/equivalence.md`.

* Nothing is bit-identical where sums are taken in another order (over replicas, tensor parts or micro-batches); that is
  all that is left, a few units in the last place, and it does not grow with the number of devices.
* Batch norm's statistics belong to a set of samples. With `batch_norm=local` a set is one replica's micro-batch, with
  `sync` it is that of all replicas together; the one-process reference takes the batch in the same sets.
* Adam divides by the size of a gradient, so it magnifies rounding where a gradient is zero in exact arithmetic (a bias
  before a batch norm, an attention's key biases): there, and only there, differences of 1e-12 and more can be seen.
* PipeDream and its relatives are held to a one-process simulation of their published update rules instead, and equal it
  bit for bit.

| strategy | processes | GPT-2 | CNN with batch norm |
|---|---|---|---|
"""


def main(target: Path) -> None:
    rows = []
    for count, texts in ((2, [*TWO, *VARIANTS]), (4, FOUR), (8, EIGHT)):
        for text in texts:
            cnn = count < 8 and text not in VARIANTS
            rows.append(_row(text, count, ["gpt2", "cnn"] if cnn else ["gpt2"], clip_norm=0.5))
    for text in ("data,batch_norm=sync", "zero1,batch_norm=sync", "zero3,batch_norm=sync"):
        rows.append(_row(text, 2, ["cnn"], clip_norm=0.5))
    for count in (2, 4):
        rows += [_row(text, count, ["gpt2", "cnn"], clip_norm=0.0) for text in ASYNCHRONOUS]
    target.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def _row(text: str, count: int, models: list[str], *, clip_norm: float) -> str:
    cells = dict.fromkeys(("gpt2", "cnn"), "–")
    for model in models:
        worst = spawn(worst_difference, count, model, text, clip_norm, "momentum")[0]
        cells[model] = "identical" if worst == 0 else f"{worst:.1e}"
    print(text, count, cells, file=sys.stderr, flush=True)
    return f"| `{text}` | {count} | {cells['gpt2']} | {cells['cnn']} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
