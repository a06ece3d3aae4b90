// What each step does, in words.

const WORDS = {
  Q: ["The queries: one row for each token that asks.", "Edit a number and watch everything move."],
  K: ["The keys: one row for each token that may be looked at.", "A query finds a key by their dot product."],
  V: ["The values: what a token passes on when it is looked at.", ""],
  Z: ["Every query meets every key: a dot product, times the scale.", "Without 1/sqrt(D) the products grow with D, the softmax saturates, and its gradient vanishes."],
  S: ["The scores: what the softmax sees, after softcap, bias and mask.", "A hidden key scores minus infinity, so its weight is exactly zero."],
  L: ["One number per query: the logarithm of the sum of exponentials of its scores.", "Kept from the forward pass, it lets the backward pass rebuild A from S, which is how linear-memory kernels work."],
  A: ["The weights: how much each query takes from each key. Each row sums to 1.", "Every row is a softmax of its own; this is why rows never mix in the backward pass."],
  O: ["The output: for each query the average of the values, by its weights.", ""],
  dO: ["The loss gradient at the output: which way of moving O raises the loss. Here the backward pass begins.", "Every gradient points to where the loss rises; descent goes the other way. Edit it: all gradients are linear in it."],
  dV: ["Each value receives what its readers received, by the weight they read it with.", "A^T: the weights of all queries on one key, a column of A."],
  dA: ["How much the loss rises with each weight: the dot product of the gradient at O and the value.", "Defined for masked keys too; their weight of 0 multiplies it away."],
  delta: ["One number per query: the average of dA by the weights. It equals rowsum(dO o O), which needs no T x S matrix.", "Subtracting it is what the softmax asks for: adding a constant to all scores of a row changes nothing."],
  dS: ["The gradient at the scores: each weight times how far its dA is above the average. Rows sum to 0.", "Above 0, more attention there raises the loss, so descent attends less. The row term is a weighted sum, not a mean; the Jacobian is never formed."],
  dZ: ["Through the softcap: dS times the slope of the cap.", "Where the cap saturates, the slope is 0 and no gradient passes."],
  dQ: ["The keys, summed by dS: descent moves each query away from keys with dS > 0, towards those with dS < 0.", "The scale comes back by the chain rule."],
  dK: ["The queries, summed by dS: descent moves each key away from queries with dS > 0, towards those with dS < 0.", "A column of dS: all queries that look at this key. With grouped queries, of all heads in the group."],
};
const OVERVIEW = ["The whole pass. Hover or focus any number to see the sum behind it; step through with [ and ].", "Numbers of Q, K, V and dO can be edited; switches, heads and mistakes recompute everything here in the page."];

// Mathematics for the eye: the formulas of rules.py with their signs.
function pretty(text) {
  return text
    .replace(/\^T/g, "\u1d40").replace(/ o /g, " \u2218 ").replace(/\bdelta\b/g, "\u03b4").replace(/\bsigma\b/g, "\u03c3")
    .replace(/\bscale /g, "scale \u00b7 ").replace(/sum_(\w)/g, "\u03a3$1").replace(/ - /g, " \u2212 ").replace(/-inf/g, "\u2212\u221e")
    .replace(/\blog \u03a3/g, "log \u03a3").replace(/\] (?=[A-Za-z\u03b4])/g, "] \u00b7 ");
}

function short(value, digits) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  const n = digits === undefined ? 2 : digits, size = Math.abs(value);
  const text = value === 0 || (size >= 0.5 * 10 ** -n && size < 999.5) ? value.toFixed(n) : value.toExponential(n > 2 ? n - 2 : 0).replace("e+", "e");
  return text.replace("-", "\u2212");
}

function percent(error) {
  if (!Number.isFinite(error)) return "not a number";
  if (error < 1e-9) return "exact";
  if (error >= 10) return `${Math.round(error)} times`;
  return `${(100 * error).toPrecision(error < 0.1 ? 2 : 3)} %`.replace(/\.0+ /, " ");
}
