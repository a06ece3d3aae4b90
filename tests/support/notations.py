r"""Formulas of attention in the notations of papers, posts, lecture notes and code: each right, and with a slip in it.

Names of the form (where it is written so, right, wrong): every pair is one notation.
"""

from __future__ import annotations

PAPERS = [
    ("FlashAttention, vectors are columns", r"dP_{ij} = do_i^T v_j", r"dP_{ij} = do_j^T v_i"),
    ("FlashAttention", r"dv_j = \sum_i P_{ij} do_i", r"dv_j = \sum_i P_{ji} do_i"),
    (
        "FlashAttention, a row of P as a column",
        r"dS_{i:} = P_{i:} \circ dP_{i:} - (P_{i:}^T dP_{i:}) P_{i:}",
        r"dS_{i:} = P_{i:} \circ dP_{i:} - (P_{i:}^T dP_{i:}) dP_{i:}",
    ),
    (
        "FlashAttention",
        r"dS_{i:} = (\mathrm{diag}(P_{i:}) - P_{i:} P_{i:}^\top) dP_{i:}",
        r"dS_{i:} = (\mathrm{diag}(P_{i:}) + P_{i:} P_{i:}^\top) dP_{i:}",
    ),
    ("FlashAttention, D", r"D_i = P_{i:}^T dP_{i:} = do_i^T o_i", r"D_i = P_{i:}^T dP_{i:} = do_i^T v_i"),
    ("FlashAttention", r"dS_{ij} = P_{ij} (dP_{ij} - D_i)", r"dS_{ij} = P_{ij} (dP_{ij} - D_j)"),
    ("FlashAttention", r"dq_i = \frac{1}{\sqrt{d}} \sum_j dS_{ij} k_j", r"dq_i = \sum_j dS_{ij} k_j"),
    (
        "FlashAttention-2, tau",
        r"\mathbf{dQ} = \tau \mathbf{dS} \mathbf{K}, \mathbf{D} = \mathrm{rowsum}(\mathbf{dO} \circ \mathbf{O})",
        r"\mathbf{dQ} = \tau \mathbf{dS} \mathbf{K}, \mathbf{D} = \mathrm{rowsum}(\mathbf{dO} \circ \mathbf{V})",
    ),
    (
        "FlashAttention-2, blocks by upper indices",
        r"\mathbf{dS}_i^{(j)} = \mathbf{P}_i^{(j)} \circ (\mathbf{dP}_i^{(j)} - D_i)",
        r"\mathbf{dS}_i^{(j)} = \mathbf{P}_i^{(j)} \circ (\mathbf{dP}_i^{(j)} + D_i)",
    ),
    (
        "FlashAttention-2, a sum over blocks",
        r"\mathbf{dV}_j \leftarrow \mathbf{dV}_j + (\mathbf{P}_i^{(j)})^\top \mathbf{dO}_i",
        r"\mathbf{dV}_j \leftarrow \mathbf{dV}_j + (\mathbf{dP}_i^{(j)})^\top \mathbf{dO}_i",
    ),
    (
        "FlashAttention-2, log-sum-exp",
        r"\mathbf{P}_i^{(j)} = \exp(\mathbf{S}_i^{(j)} - L_i)",
        r"\mathbf{P}_i^{(j)} = \exp(\mathbf{S}_i^{(j)} - L_j)",
    ),
    (
        "the loss phi",
        r"\frac{\partial \phi}{\partial \mathbf{V}} = \mathbf{P}^\top \frac{\partial \phi}{\partial \mathbf{O}}",
        r"\frac{\partial \phi}{\partial \mathbf{V}} = \mathbf{P} \frac{\partial \phi}{\partial \mathbf{O}}",
    ),
    ("the gradient that comes in is G", r"dV = P^T G, dP = G V^T", r"dV = P G, dP = G V^T"),
    (
        "G, with its row term",
        r"dS = P \odot (G V^T - \mathrm{rowsum}(G \odot O))",
        r"dS = P \odot (G V^T - \mathrm{rowsum}(G))",
    ),
    (
        "diag(D)",
        r"dS = P \circ dP - \mathrm{diag}(D) P",
        r"dS = P \circ dP - P \mathrm{diag}(D)",
    ),
]

POSTS = [
    (
        "the column form of the softmax Jacobian",
        r"\frac{\partial A_i}{\partial S_i} = \mathrm{diag}(A_i) - A_i A_i^T",
        r"\frac{\partial A_i}{\partial S_i} = \mathrm{diag}(A_i) - A_i \odot A_i",
    ),
    (
        "one row, bold",
        r"\frac{\partial \mathbf{a}}{\partial \mathbf{s}} = \operatorname{diag}(\mathbf{a}) - \mathbf{a}\mathbf{a}^\top",
        r"\frac{\partial \mathbf{a}}{\partial \mathbf{s}} = \operatorname{diag}(\mathbf{a}) - \mathbf{s}\mathbf{a}^\top",
    ),
    (
        "Kronecker's delta",
        r"\frac{\partial a_i}{\partial s_j} = a_i (\delta_{ij} - a_j)",
        r"\frac{\partial a_i}{\partial s_j} = a_i (\delta_{ij} - a_i)",
    ),
    (
        "p for probabilities, z for logits",
        r"\frac{\partial p_i}{\partial z_j} = p_i (\mathbb{1}_{i=j} - p_j)",
        r"\frac{\partial p_i}{\partial z_j} = p_i (1 - p_j)",
    ),
    (
        "a primed index",
        r"dS_{ij} = A_{ij} \left(dA_{ij} - \sum_{j'} A_{ij'} dA_{ij'}\right)",
        r"dS_{ij} = A_{ij} \left(dA_{ij} - \sum_{j'} dA_{ij'}\right)",
    ),
    (
        "prime as a command",
        r"A_{ij} = \frac{\exp(S_{ij})}{\sum_{j^{\prime}=1}^{N} \exp(S_{ij^{\prime}})}",
        r"A_{ij} = \frac{\exp(S_{ij})}{\sum_{i^{\prime}=1}^{N} \exp(S_{i^{\prime}j})}",
    ),
    (
        "an inner product",
        r"ds_i = a_i \odot (da_i - \langle a_i, da_i \rangle)",
        r"ds_i = a_i \odot (da_i - \langle a_i, a_i \rangle)",
    ),
    (
        "an inner product, Unicode",
        "Sᵢⱼ = ⟨qᵢ, kⱼ⟩ / √dₖ",
        "Sᵢⱼ = ⟨qⱼ, kᵢ⟩ / √dₖ",
    ),
    (
        "Frobenius",
        r"\langle dO, \dot{O} \rangle = \langle dV, \dot{V} \rangle + \langle dA, \dot{A} \rangle",
        r"\langle dO, \dot{O} \rangle = \langle dV, \dot{V} \rangle - \langle dA, \dot{A} \rangle",
    ),
    (
        "heads as upper indices",
        r"A^{(h)} = \text{softmax}\left(\frac{Q^{(h)} {K^{(h)}}^\top}{\sqrt{d_h}}\right)",
        r"A^{(h)} = \text{softmax}\left(\frac{Q^{(h)} {K^{(h)}}^\top}{d_h}\right)",
    ),
    (
        "tokens as upper indices",
        r"o^{(i)} = \sum_{j} a^{(i)}_j v^{(j)}",
        r"o^{(i)} = \sum_{j} a^{(j)}_i v^{(j)}",
    ),
    (
        "an upright d before a bold letter",
        r"\mathrm{d}\mathbf{K} = \frac{1}{\sqrt{d_k}} \mathrm{d}\mathbf{S}^\top \mathbf{Q}",
        r"\mathrm{d}\mathbf{K} = \frac{1}{\sqrt{d_k}} \mathrm{d}\mathbf{S} \mathbf{Q}",
    ),
    (
        "upright fractions",
        r"\frac{\mathrm{d}\mathcal{L}}{\mathrm{d}\mathbf{V}} := \mathbf{A}^\top \frac{\mathrm{d}\mathcal{L}}{\mathrm{d}\mathbf{O}}",
        r"\frac{\mathrm{d}\mathcal{L}}{\mathrm{d}\mathbf{V}} := \mathbf{A}^\top \mathbf{O}",
    ),
    (
        "nabla at a weight",
        r"\nabla_{W_V} \mathcal{L} = X^\top A^\top \nabla_{O} \mathcal{L}",
        r"\nabla_{W_V} \mathcal{L} = X^\top A \nabla_{O} \mathcal{L}",
    ),
    (
        "x_i as a column, weights (out, in)",
        r"q_i = W_Q x_i, k_i = W_K x_i",
        r"q_i = W_Q x_i, k_i = x_i^T W_K",
    ),
    ("torch's Linear", r"Q = X W_Q^T, dW_Q = dQ^T X", r"Q = X W_Q^T, dW_Q = X^T dQ"),
    ("the times sign", r"S = \frac{Q \times K^T}{\sqrt{d_k}}", r"S = \frac{Q \times K}{\sqrt{d_k}}"),
    (
        "softmax with its axis below",
        r"A = \operatorname{softmax}_{\text{row}}(S), L = \mathrm{LSE}(S)",
        r"A = \operatorname{softmax}_{\text{row}}(S^T)^T, L = \mathrm{LSE}(S)",
    ),
]

NOTES = [
    ("adjoints with a bar", r"\bar{V} = A^\top \bar{O}", r"\bar{V} = A \bar{O}"),
    (
        "adjoints with a bar",
        r"\bar{S} = A \circ (\bar{A} - (A \circ \bar{A}) \mathbf{1}\mathbf{1}^\top)",
        r"\bar{S} = A \circ (\bar{A} - \mathbf{1}\mathbf{1}^\top (A \circ \bar{A}))",
    ),
    ("an overline", r"\overline{Q} = \tau \overline{S} K", r"\overline{Q} = \tau \overline{S}^T K"),
    (
        "weights with a hat",
        r"\hat{A} = \mathrm{softmax}(S), O = \hat{A} V",
        r"\hat{A} = \mathrm{softmax}(S), O = \hat{A}^T V",
    ),
    (
        "tangents with a tilde",
        r"\tilde{A} = A \odot (\tilde{S} - \tilde{L})",
        r"\tilde{A} = A \odot (\tilde{S} + \tilde{L})",
    ),
    (
        "a tilde that is only a mark",
        r"\tilde{A} = \mathrm{softmax}(\tilde{S})",
        r"\tilde{A} = \mathrm{softmax}(\tilde{S}) V",
    ),
    (
        "long names in LaTeX",
        r"\text{grad\_scores} = \text{attn\_weights} \odot (\text{grad\_attn\_weights} - D)",
        r"\text{grad\_scores} = \text{attn\_weights} \odot \text{grad\_attn\_weights}",
    ),
]

CODE = [
    (
        "NumPy",
        "dS = P * (dP - np.sum(P * dP, axis=-1, keepdims=True))",
        "dS = P * (dP - np.sum(P * dP, axis=-1))",
    ),
    (
        "NumPy, a method",
        "dS = P * (dP - (dO * O).sum(-1, keepdims=True))",
        "dS = P * (dP - (dO * O).sum(0, keepdims=True))",
    ),
    (
        "NumPy, a new axis",
        "dS = P * (dP - np.sum(dO * O, axis=1)[:, None])",
        "dS = P * (dP - np.mean(dO * O, axis=1)[:, None])",
    ),
    (
        "NumPy, a line per result",
        "dP = dO @ V.T\ndS = P * (dP - D[:, None])  # the row term\ndQ = dS @ K / np.sqrt(d_k)",
        "dP = dO @ V.T\ndS = P * (dP - D[:, None])  # the row term\ndQ = dS @ K",
    ),
    ("NumPy, swapaxes", "dk = ds.swapaxes(-1, -2) @ q / np.sqrt(q.shape[-1])", "dk = ds @ q / np.sqrt(q.shape[-1])"),
    (
        "NumPy, the stable softmax",
        "A = np.exp(S - S.max(axis=-1, keepdims=True)) / np.exp(S - S.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)",
        "A = np.exp(S - S.max(axis=-1, keepdims=True)) / np.exp(S).sum(axis=-1, keepdims=True)",
    ),
    ("NumPy, outer", "J_i = np.diag(A_i) - np.outer(A_i, A_i)", "J_i = np.diag(A_i) - np.inner(A_i, A_i)"),
    (
        "torch",
        "grad_scores = attn_weights * (grad_attn_weights - (grad_output * output).sum(dim=-1, keepdim=True))",
        "grad_scores = attn_weights * (grad_attn_weights - (grad_output * output).sum(dim=-2, keepdim=True))",
    ),
    (
        "torch",
        "grad_value = torch.matmul(attn_weights.transpose(-2, -1), grad_output)",
        "grad_value = torch.matmul(attn_weights, grad_output)",
    ),
    ("torch", "attn = F.softmax(scores, dim=-1)", "attn = F.softmax(scores, dim=-2)"),
    ("torch, scale", "grad_query = sm_scale * torch.bmm(grad_scores, key)", "grad_query = torch.bmm(grad_scores, key)"),
    ("torch, in place", "dv += attn_probs.transpose(-1, -2) @ dout", "dv += attn_probs @ dout"),
    ("log-sum-exp", "lse = torch.logsumexp(scores, dim=-1)", "lse = torch.logsumexp(scores, dim=-1) * scale"),
    ("einsum", 'dV = np.einsum("ij,id->jd", A, dO)', 'dV = np.einsum("ij,jd->id", A, dO)'),
    (
        "einsum with a batch and heads",
        "dP = torch.einsum('bhid,bhjd->bhij', dO, V)",
        "dP = torch.einsum('bhid,bhjd->bhij', O, V)",
    ),
    (
        "einsum, heads behind the tokens",
        "S = np.einsum('bqhd,bkhd->bhqk', Q, K) * scale",
        "S = np.einsum('bqhd,bkhd->bhqk', Q, K)",
    ),
    ("einsum, the row term", "D = np.einsum('...id,...id->...i', dO, O)", "D = np.einsum('...id,...id->...i', dO, dO)"),
    (
        "einsum, a column along a matrix",
        "dS = P * dP - np.einsum('ij,i->ij', P, D)",
        "dS = P * dP - np.einsum('ij,i->ij', dP, D)",
    ),
    ("names with dL_d", "dL_dQ = dL_dS @ K * softmax_scale", "dL_dQ = dL_dS.T @ K * softmax_scale"),
]

NOTATIONS = PAPERS + POSTS + NOTES + CODE
