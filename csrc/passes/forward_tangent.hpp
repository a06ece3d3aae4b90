// The tangent of the forward pass: one online pass gives out, lse, out_dot and lse_dot.
//
//     z_dot = scale (q_dot k^T + q k_dot^T) (T1); s_dot = m'(z) o z_dot + bias_dot (T2)
//     lse_dot = rowsum(p o s_dot) + exp(sigma - lse) sigma_dot (T3); p_dot = p o (s_dot - lse_dot) (T4)
//     out_dot = (p_dot o M) v + (p o M) v_dot (T5)
//
// The sums of p s_dot v hold s_dot less its mean so far, which is lse_dot in the end; they follow when the mean changes. The
// mean in turn is measured from s_dot at the largest score so far, the shift. So a row that attends to one key alone has
// p_dot = 0 exactly, and neither a shift common to a row nor a mean of v costs digits. What rounding leaves of
// sum p (s_dot - shift - mean) is kept, too, and taken off in the end.
#pragma once

#include "passes/forward.hpp"

namespace attngrad::ATTNGRAD_ISA {

// OnlineRows, with tangents.
template <class T>
struct OnlineTangentRows : OnlineRows<T> {
    T* tangent_shift;    // s_dot at row_max
    T* tangent_mean;     // the mean of s_dot - tangent_shift
    T* tangent_residue;  // the sum of p (s_dot - tangent_shift - tangent_mean)
    T* mean_step;        // by how much rescale * (tangent_shift + tangent_mean) has just changed

    static OnlineTangentRows take(Arena& arena) {
        return {OnlineRows<T>::take(arena), arena.take<T>(block<T>), arena.take<T>(block<T>), arena.take<T>(block<T>),
                arena.take<T>(block<T>)};
    }
};

// `softmax`, with tangents: turns scores into p o M and z_dot into (p o (s_dot - tangent_shift - tangent_mean)) o M, in place.
template <class T, int NV>
__attribute__((noinline)) void softmax_tangent_vectors(const Scores<T> scores, ScoreTile<T> s, ScoreTile<T> s_dot,
                                                       const Part& part, const OnlineTangentRows<T>& rows) {
    constexpr int W = lanes<T>;
    const int lane = part.lane;
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
    Vec<T> m[NV], tangent_shift[NV], sums[NV] = {}, sums_dot[NV] = {};
    for (int v = 0; v < NV; ++v) {
        m[v] = load<T>(rows.row_max + lane + v * W);
        tangent_shift[v] = load<T>(rows.tangent_shift + lane + v * W);
    }
    each_key(part, scores.paths(false), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T *to = s.at(k, lane), *to_dot = s_dot.at(k, lane);
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(to + v * W), x_dot = load<T>(to_dot + v * W);
            if constexpr (modified<path>) {
                Modified<T> y{x};
                if constexpr (path == Path::biased) y.value = scores.add_bias(x, k, lane + v * W);
                if constexpr (path == Path::general) y = scores.apply(x, k, lane + v * W);
                x = y.value;
                x_dot = scores.tangent(x_dot, y.slope, k, lane + v * W);
            } else {
                if constexpr (path == Path::hidden) x = scores.hide(x, k, lane + v * W);
                x_dot = scores.unmodified_tangent(x_dot);
            }
            if constexpr (path != Path::clear) {
                x_dot = x == minus_inf ? Vec<T>{} : x_dot;
                store<T>(to + v * W, x);
            }
            store<T>(to_dot + v * W, x_dot);
            const Int<T> larger = x > m[v];
            m[v] = larger ? x : m[v];
            tangent_shift[v] = larger ? x_dot : tangent_shift[v];
        }
    });
    for (int v = 0; v < NV; ++v) {
        const int at = lane + v * W;
        const Vec<T> old = load<T>(rows.row_max + at);
        store<T>(rows.row_max + at, m[v]);
        m[v] = m[v] == minus_inf ? Vec<T>{} : m[v];
        store<T>(rows.rescale + at, exp2<T>(scores.exponent(old - m[v])));
    }
    each_key(part, scores.paths(false), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T *to = s.at(k, lane), *to_dot = s_dot.at(k, lane);
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(to + v * W) - m[v];
            if constexpr (modified<path>) x = scores.exponent(x);
            const Vec<T> p = exp2<T>(x), x_dot = load<T>(to_dot + v * W) - tangent_shift[v];
            sums[v] += p;
            sums_dot[v] += p * x_dot;
            store<T>(to + v * W, p);
            store<T>(to_dot + v * W, x_dot);
        }
    });
    Vec<T> tangent_mean[NV], tangent_residue[NV] = {};
    for (int v = 0; v < NV; ++v) {
        const int at = lane + v * W;
        const Vec<T> rescale = load<T>(rows.rescale + at), old_sum = load<T>(rows.row_sum + at), before = old_sum * rescale;
        const Vec<T> moved = tangent_shift[v] - load<T>(rows.tangent_shift + at), old = load<T>(rows.tangent_mean + at),
                     all = before + sums[v];
        const Vec<T> sum = (load<T>(rows.row_max + at) == minus_inf) & (all == all) ? Vec<T>{} : all;  // as in softmax()
        tangent_mean[v] = sum == Vec<T>{} ? Vec<T>{} : (sums_dot[v] + before * (old - moved)) / sum;
        store<T>(rows.row_sum + at, sum);
        store<T>(rows.tangent_shift + at, tangent_shift[v]);
        store<T>(rows.tangent_mean + at, tangent_mean[v]);
        const Vec<T> mean_step = rescale * (moved + (tangent_mean[v] - old));
        store<T>(rows.mean_step + at, mean_step);
        store<T>(rows.tangent_residue + at, load<T>(rows.tangent_residue + at) * rescale - mean_step * old_sum);
    }
    const Path last = scores.drops() ? Path::general : Path::clear;
    each_key(part, {last, last}, [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T *to = s.at(k, lane), *to_dot = s_dot.at(k, lane);
        for (int v = 0; v < NV; ++v) {
            Vec<T> p = load<T>(to + v * W), p_dot = p * (load<T>(to_dot + v * W) - tangent_mean[v]);
            tangent_residue[v] += p_dot;
            if constexpr (path == Path::general) {
                const Vec<T> keep = scores.keep(k, lane + v * W);
                store<T>(to + v * W, p * keep);
                p_dot *= keep;
            }
            store<T>(to_dot + v * W, p_dot);
        }
    });
    for (int v = 0; v < NV; ++v) {
        T* to = rows.tangent_residue + lane + v * W;
        store<T>(to, load<T>(to) + tangent_residue[v]);
    }
}

template <class T>
ATTNGRAD_INLINE void softmax_tangent(const Scores<T>& scores, ScoreTile<T> s, ScoreTile<T> s_dot, const Part& part,
                                     const OnlineTangentRows<T>& rows) {
    with_vectors<3>(part.vectors,
                    [&]<int NV>() ATTNGRAD_LAMBDA { softmax_tangent_vectors<T, NV>(scores, s, s_dot, part, rows); });
}

template <class T>
class ForwardTangent {
public:
    ForwardTangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, char* memory)
        : ForwardTangent(p, t, r, Arena(memory)) {}
    static std::size_t bytes(const Problem& p, const Tangents& t) { return ForwardTangent(p, t, {}, Arena(nullptr)).used_; }

    void run(std::int64_t b, std::int64_t key_head, std::int64_t first, int length, const ParallelCall& parallel) {
        q_.set(p_, b, key_head, first, length);
        pack_lanes<T>(p_.type, p_.q, q_, p_.D, Scores<T>::query_factor(p_), rows_, qt_);
        if (t_.q.data) pack_lanes<T>(p_.type, t_.q, q_, p_.D, Scores<T>::query_factor(p_), rows_, q_dot_t_);
        start();
        const Span seen = q_.all.outer;
        for (long k0 = seen.a / keys<T> * keys<T>; k0 < seen.b && !parallel.cancelled(); k0 += keys<T>) {
            const long k1 = std::min<long>(k0 + keys<T>, seen.b);
            if (scores_.prepare(q_, k0, k1)) process_key_tile(key_head, k0, k1);
        }
        finish();
    }

private:
    ForwardTangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, Arena arena)
        : p_(p),
          t_(t),
          r_(r),
          rows_(arena.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          qt_(arena.take<T>(padded<T>(p.D) * block<T>)),
          q_dot_t_(t.q.data ? arena.take<T>(padded<T>(p.D) * block<T>) : nullptr),
          sums_(arena.take<T>(padded<T>(p.E) * block<T>)),
          sums_dot_(arena.take<T>(padded<T>(p.E) * block<T>)),
          st_(arena.take<T>(keys<T> * block<T>)),
          dt_(t.scores() ? arena.take<T>(keys<T> * block<T>) : nullptr),
          online_(OnlineTangentRows<T>::take(arena)),
          k_(p.type, p.D, false, arena),
          v_(p.type, p.E, true, arena),
          k_dot_(p.type, t.k.data ? p.D : 0, false, arena),
          v_dot_(p.type, t.v.data ? p.E : 0, true, arena),
          scores_(p, arena, t.bias),
          used_(arena.used()) {}

    // With a sink, the softmax starts from it: one more key, whose value is zero and whose s_dot is sigma_dot.
    void start() {
        constexpr T minus_inf = -std::numeric_limits<T>::infinity();
        for (int n = 0; n < q_.width; ++n) {
            const T sink = Scores<T>::sink(p_, q_.head[n]);
            online_.start(n, sink);
            online_.tangent_shift[n] = t_.sinks && sink != minus_inf ? static_cast<const T*>(t_.sinks)[q_.head[n]] : 0;
            online_.tangent_mean[n] = online_.tangent_residue[n] = online_.mean_step[n] = 0;
        }
        for (T* sums : {sums_, sums_dot_}) std::memset(sums, 0, sizeof(T) * q_.count * padded<T>(p_.E));
    }

    void process_key_tile(std::int64_t key_head, long k0, long k1) {
        k_.load(p_.k, q_.b, key_head, k0, k1);
        v_.load(p_.v, q_.b, key_head, k0, k1);
        if (t_.k.data) k_dot_.load(t_.k, q_.b, key_head, k0, k1);
        if (t_.v.data) v_dot_.load(t_.v, q_.b, key_head, k0, k1);
        const ScoreTile<T> s{st_, k0}, s_dot{dt_, k0};
        for (int lane = 0; lane < q_.width; lane += panel<T>) {
            const Panel<T> panel(q_, lane, k0, k1);
            if (panel.fully_masked()) continue;
            panel.parts([&](const Part& part) ATTNGRAD_LAMBDA {
                k_.template dots<ToZero>(part, qt_, s);  // (F1)
                if (s_dot)
                    sum_of_dots<T>(part, t_.q.data ? &k_ : nullptr, q_dot_t_, t_.k.data ? &k_dot_ : nullptr, qt_,
                                   s_dot);  // (T1)
            });
            panel.rows([&](const Part& part) ATTNGRAD_LAMBDA {
                if (s_dot) {
                    softmax_tangent<T>(scores_, s, s_dot, part, online_);
                } else {
                    softmax<T>(scores_, s, part, online_);
                }
            });
            for (int n = lane; n < std::min(panel.end(), q_.count); ++n) rescale(n);
            panel.parts([&](const Part& part) ATTNGRAD_LAMBDA {
                v_.template combine<ToC>(part, s, sums_);                     // (F5)
                if (s_dot) v_.template combine<ToC>(part, s_dot, sums_dot_);  // (T5)
                if (t_.v.data) v_dot_.template combine<ToC>(part, s, sums_dot_);
            });
        }
    }

    // The sums of one query follow its new maximum and tangent_shift.
    void rescale(int n) {
        const T factor = online_.rescale[n], mean_step = online_.mean_step[n];
        if (factor == 1 && mean_step == 0) return;
        T *sums = sums_ + n * padded<T>(p_.E), *sums_dot = sums_dot_ + n * padded<T>(p_.E);
        for (long e = 0; e < padded<T>(p_.E); e += lanes<T>) {
            const Vec<T> x = load<T>(sums + e);
            store<T>(sums_dot + e, load<T>(sums_dot + e) * factor - mean_step * x);
            store<T>(sums + e, x * factor);
        }
    }

    void finish() {
        for (int n = 0; n < q_.width; n += lanes<T>)
            write_statistics<T>(p_, r_.f, q_.index(p_, n), q_.count - n, load<T>(online_.row_max + n),
                                load<T>(online_.row_sum + n));
        for (int n = 0; n < q_.width; ++n) {
            const T inv_row_sum = online_.row_sum[n] == 0 ? 0 : 1 / online_.row_sum[n];
            online_.rescale[n] = inv_row_sum;  // of no other use any more
            online_.tangent_residue[n] *= inv_row_sum;
            online_.tangent_mean[n] += online_.tangent_residue[n];
            if (n >= q_.count) continue;
            const std::int64_t at = q_.index(p_, n);
            static_cast<T*>(r_.lse_dot)[at] = online_.tangent_shift[n] + online_.tangent_mean[n];
            if (r_.tangent_shift) static_cast<T*>(r_.tangent_shift)[at] = online_.tangent_shift[n];
            if (r_.tangent_mean) static_cast<T*>(r_.tangent_mean)[at] = online_.tangent_mean[n];
        }
        for (int n = 0; n < q_.count && dt_; ++n) {
            const long first = n * padded<T>(p_.E);
            for (long e = first; e < first + padded<T>(p_.E); e += lanes<T>)
                store<T>(sums_dot_ + e, load<T>(sums_dot_ + e) - online_.tangent_residue[n] * load<T>(sums_ + e));
        }
        const auto write = [&](const T* sums, const ResultRows& out, const ResultRows& wide_out) {
            write_rows<T>(p_.type, sums, online_.rescale, p_, q_, p_.E, out);
            write_rows<T>(compute_type<T>, sums, online_.rescale, p_, q_, p_.E, wide_out);
        };
        write(sums_, r_.f.out, r_.f.wide_out);
        write(sums_dot_, r_.out_dot, r_.wide_out_dot);
    }

    const Problem& p_;
    const Tangents& t_;
    ForwardTangentResult r_;
    Block<T> q_;
    T *rows_, *qt_, *q_dot_t_, *sums_, *sums_dot_, *st_, *dt_;
    OnlineTangentRows<T> online_;
    KeyTile<T> k_, v_, k_dot_, v_dot_;
    Scores<T> scores_;
    std::size_t used_;
};

template <class T>
void forward_tangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, ParallelCall& parallel) {
    if (p.B * p.Hq * p.T == 0) return;
    run_blocks<ForwardTangent<T>, T>(p, 6.0 * (p.D + p.E), parallel, ForwardTangent<T>::bytes(p, t),
                                     [&](char* memory) { return ForwardTangent<T>(p, t, r, memory); });
}

}  // namespace attngrad::ATTNGRAD_ISA
