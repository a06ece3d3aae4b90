// The mistakes of the documents that this project starts from; `refs` are their ids in `attngrad errata`.

const MISTAKES = [
  {
    id: "mean", label: "mean for weighted sum", refs: "back-pass-16",
    says: "dS = A o dA - mean(A o dA)", right: "dS = A o dA - A o rowsum(A o dA)",
    why: "The mean of a row is not its weighted sum; it is right only where every key weighs the same.",
    wrong: {
      dS: ({ A, dA, sees }) => {
        const g = map(A, (a, i, j) => a * get(dA, i, j)), total = rowsum(g);
        return map(g, (value, i, j) => (sees(i, j) ? value - get(total, i) / g.cols : 0));
      },
    },
  },
  {
    id: "mix", label: "rows mixed", refs: "back-pass-5, back-pass-31",
    says: "dS = A o dA - A dA^T A", right: "dS = A o (dA - rowsum(A o dA))",
    why: "The softmax acts on each row alone: of A dA^T only the diagonal belongs.",
    wrong: {
      dS: ({ A, dA, sees }) => {
        const mixed = product(product(A, dA, false, true), A);
        return map(A, (a, i, j) => (sees(i, j) ? a * get(dA, i, j) - get(mixed, i, j) : 0));
      },
    },
  },
  {
    id: "columns", label: "column sums", refs: "back-pass-34",
    says: "dS = A o (dA - sum_i A_i dA_i)", right: "dS = A o (dA - rowsum(A o dA))",
    why: "The sum must run along each row, over the keys, not down the queries.",
    wrong: {
      dS: ({ A, dA, sees }) => {
        const totals = new Float64Array(A.cols);
        map(A, (a, i, j) => (totals[j] += a * get(dA, i, j)));
        return map(A, (a, i, j) => (sees(i, j) ? a * (get(dA, i, j) - totals[j]) : 0));
      },
    },
  },
  {
    id: "one-jacobian", label: "one Jacobian", refs: "back-pass-28",
    says: "dS = dA J, with the J of the first row", right: "dS_i = dA_i J_i, one J for each row i",
    why: "Each row has a softmax of its own, and so a Jacobian of its own.",
    wrong: {
      dS: ({ A, dA, sees }) => map(A, (a, i, j) => {
        let weighted = 0;
        for (let x = 0; x < A.cols; x++) weighted += get(dA, i, x) * get(A, 0, x);
        return sees(i, j) ? get(A, 0, j) * (get(dA, i, j) - weighted) : 0;
      }),
    },
  },
  {
    id: "skip-softmax", label: "softmax skipped", refs: "equation-z-5, equation-z-7",
    says: "dQ = dA K, dK = dA^T Q", right: "dQ = scale dS K, dK = scale dS^T Q",
    why: "dA is the gradient after the softmax. Its Jacobian is skipped, and the scale with it.",
    wrong: { gradientsUnscaled: true, dS: ({ dA }) => dA },
  },
  {
    id: "forget-scale", label: "scale forgotten", refs: "equation-z-5, explicit-formula-12",
    says: "dQ = dS K, dK = dS^T Q", right: "dQ = scale dS K, dK = scale dS^T Q",
    why: "Right for scale 1. With 1/sqrt(D) in the scores the chain rule brings it back in dQ and dK.",
    wrong: { gradientsUnscaled: true },
  },
  {
    id: "transpose-dk", label: "dK transposed", refs: "back-pass-8",
    says: "dK = scale Q^T dS", right: "dK = scale dS^T Q",
    why: "That is the transpose of dK: D x S where dK is S x D.",
    wrong: { dKTransposed: true },
  },
  {
    id: "unturned-dv", label: "A not transposed in dV", refs: "back-pass-15",
    says: "dV = A dO", right: "dV = A^T dO",
    why: "transpose(0, 1, 2, 3) leaves every axis where it is.",
    wrong: { dVUnturned: true },
  },
  {
    id: "unscaled-scores", label: "unscaled scores", refs: "equation-z-2, back-pass-32",
    says: "A = softmax(Q K^T)", right: "A = softmax(scale Q K^T)",
    why: "The scale is gone from the scores: another function, and so are all its gradients.",
    wrong: { scoresUnscaled: true },
  },
  {
    id: "no-maximum", label: "no maximum in exp", refs: "transformer-5",
    says: "A = exp(S) / rowsum(exp(S))", right: "A = exp(S - max) / rowsum(exp(S - max))",
    why: "Equal on paper. In float64 exp overflows above 709: put 9999 into Q to see it.",
    wrong: { noMaximum: true },
  },
];

// How far `shown` is from `right`: max |a - b| / max |b|; null where the shapes differ.
function relativeError(shown, right) {
  let worst = 0, largest = 0;
  for (let h = 0; h < right.length; h++) {
    const a = shown[h], b = right[h];
    if (a === null || a.rows !== b.rows || a.cols !== b.cols) return null;
    for (let n = 0; n < b.data.length; n++) {
      largest = Math.max(largest, Math.abs(b.data[n]));
      const off = Math.abs(a.data[n] - b.data[n]);
      worst = Number.isNaN(off) ? Infinity : Math.max(worst, off);
    }
  }
  return worst / (largest || 1);
}

function shapeOf(m) {
  return m === null ? "none" : `${m.rows} x ${m.cols}`;
}

// What a mistake does to O and the gradients: [{name, error}], error null where the shape is wrong.
function damage(shown, right) {
  return ["O", "dQ", "dK", "dV"].map((name) => ({
    name, error: relativeError(shown[name], right[name]),
    shape: shapeOf(shown[name][0]), expected: shapeOf(right[name][0]),
  }));
}
