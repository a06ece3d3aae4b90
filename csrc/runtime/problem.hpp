// What a kernel is asked to do: raw pointers, strides and numbers, the same for every instruction set.
#pragma once

#include <cstdint>

#include "runtime/philox.hpp"
#include "runtime/platform.hpp"

namespace attngrad {

// Codes of the storage types, as the bindings pass them.
enum class Type : int { f64 = 0, f32 = 1, f16 = 2, bf16 = 3 };
constexpr std::int64_t size_of(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

// An array (B, H, rows, features): strides in elements, features contiguous.
struct Rows {
    const void* data = nullptr;
    std::int64_t b = 0, h = 0, row = 0;
};

// One that is written; strides of 0: it is contiguous.
struct ResultRows {
    void* data = nullptr;
    std::int64_t b = 0, h = 0, row = 0;

    ResultRows(void* contiguous = nullptr) : data(contiguous) {}
    explicit operator bool() const { return data != nullptr; }
    bool is_contiguous() const { return row == 0; }

    // Where row `t` of an array (B, heads, rows, length) begins, in elements.
    std::int64_t at(std::int64_t heads, std::int64_t rows, std::int64_t length, std::int64_t b0, std::int64_t head,
                    std::int64_t t) const {
        return row ? b0 * b + head * h + t * row : ((b0 * heads + head) * rows + t) * length;
    }
};

// An array that broadcasts to (B, Hq, T, S): strides in elements, 0 along broadcast axes.
struct Plane {
    const void* data = nullptr;
    Type type = Type::f32;
    std::int64_t b = 0, h = 0, t = 0, s = 0;
    explicit operator bool() const { return data != nullptr; }
};

struct Problem {
    Type type = Type::f32;  // of q, k, v, dout, out and the gradients
    std::int64_t B = 0, Hq = 0, Hk = 0, T = 0, S = 0, D = 0, E = 0;
    Rows q, k, v;

    double scale = 1.0;
    double softcap = 0.0;  // 0: none
    bool causal = false;
    std::int64_t left = -1, right = -1;    // the window; -1: unbounded
    const std::int64_t* offset = nullptr;  // (B,): the position of query 0 among the keys
    Plane mask, bias;
    const void* sinks = nullptr;                                      // (Hq,), in the compute type
    const std::int32_t *q_segments = nullptr, *k_segments = nullptr;  // (B, T) and (B, S)
    double dropout = 0.0;
    std::uint64_t seed = 0;
    Origin origin;
    bool natural = false;  // scores are held in natural units even without bias and sinks (see Scores::unit)

    std::int64_t group() const { return Hk ? Hq / Hk : 1; }
    bool banded() const { return causal || left >= 0 || right >= 0; }
};

// The row statistics that a backward pass rebuilds the weights from: p = exp2(s log2(e) - row_max) * inv_row_sum. All arrays
// but out are contiguous, and but out in the compute type. A row that sees nothing has row_max = 0 and inv_row_sum = 0.
struct ForwardResult {
    ResultRows out;                                                   // (B, Hq, T, E), in the storage type; may be null
    void* wide_out = nullptr;                                         // the same in the compute type; may be null
    void *lse = nullptr, *row_max = nullptr, *inv_row_sum = nullptr;  // (B, Hq, T)
};

// The directions of forward mode; null data: zero, and skipped.
struct Tangents {
    Rows q, k, v;
    Plane bias;
    const void* sinks = nullptr;                                       // (Hq,), in the compute type
    bool scores() const { return q.data || k.data || bias || sinks; }  // whether there is a score tangent
};

// lse_dot = tangent_shift + tangent_mean, kept separately: the tangent_shift is s_dot at the largest score of the row, so that
// what is common to the row, however large, costs no digits of what is measured from it.
struct ForwardTangentResult {
    ForwardResult f;
    void *out_dot = nullptr, *wide_out_dot = nullptr;                            // like out and wide_out
    void *lse_dot = nullptr, *tangent_shift = nullptr, *tangent_mean = nullptr;  // (B, Hq, T); the last two may be null
};

struct BackwardProblem {
    Rows dout;                   // null data: zero
    const void* dlse = nullptr;  // (B, Hq, T), compute type; null: zero
    const void* out = nullptr;   // (B, Hq, T, E), compute type, contiguous
    const void *row_max = nullptr, *inv_row_sum = nullptr;
    // These three may be null: not wanted.
    void* dq = nullptr;                 // (B, Hq, T, D), storage type
    void *dk = nullptr, *dv = nullptr;  // (B, Hk, S, D) and (B, Hk, S, E), storage type; written where B Hq T > 0
    void* delta = nullptr;              // (B, Hq, T), compute type
    Plane dbias;                        // compute type; null where there is no bias, or it is not wanted
    bool dbias_alone = false;           // every score has its own number there: it is written; else added to, zero before
};

struct BackwardTangentProblem {
    BackwardProblem g;
    Rows dout_dot;                   // null data: zero
    const void* dlse_dot = nullptr;  // (B, Hq, T), compute type; null: zero
    const void* out_dot = nullptr;   // (B, Hq, T, E), compute type, contiguous
    const void *tangent_shift = nullptr, *tangent_mean = nullptr;
    void* dq_dot = nullptr;  // what follows is laid out like its namesake without _dot
    void *dk_dot = nullptr, *dv_dot = nullptr, *delta_dot = nullptr;
    Plane dbias_dot;
};

// A kernel runs tasks 0, 1, ... of a fixed list; any thread may take the next one. Returns false when cancelled.
class ParallelCall;

// The four passes, for the storage types of one compute type: float64 alone; float32, float16 and bfloat16.
struct Passes {
    void (*forward)(const Problem&, const ForwardResult&, ParallelCall&);
    void (*backward)(const Problem&, const BackwardProblem&, ParallelCall&);
    void (*forward_tangent)(const Problem&, const Tangents&, const ForwardTangentResult&, ParallelCall&);
    void (*backward_tangent)(const Problem&, const Tangents&, const BackwardTangentProblem&, ParallelCall&);
};

struct Tools {
    // float32 sums rounded to a 16-bit type.
    void (*narrow)(Type type, const void* in, void* out, std::int64_t n, ParallelCall&);
    // Probes of the machine, on one thread: operations done, bytes read.
    double (*multiply_add_f32)(std::int64_t rounds);
    double (*multiply_add_f64)(std::int64_t rounds);
    double (*read_memory)(const float* data, std::int64_t n);
};

// All that is compiled for one instruction set.
struct Kernels {
    const char* name;
    const Passes *float64, *float32;
    const Tools* tools;
    const Passes& passes(Type type) const { return type == Type::f64 ? *float64 : *float32; }
};

}  // namespace attngrad
