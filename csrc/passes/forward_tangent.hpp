// The tangent of the forward pass: one online pass gives out, lse, out_dot and lse_dot.
//
//     z_dot = scale (q_dot k^T + q k_dot^T) (T1); s_dot = m'(z) o z_dot + bias_dot (T2)
//     lse_dot = rowsum(p o s_dot) + exp(sigma - lse) sigma_dot (T3); p_dot = p o (s_dot - lse_dot) (T4)
//     out_dot = (p_dot o M) v + (p o M) v_dot (T5)
//
// The sums of p s_dot v hold s_dot less its mean so far, which is lse_dot in the end; they follow when the mean moves. The
// mean in turn is measured from s_dot at the largest score so far (the shift). So a row that attends to one key alone has
// p_dot = 0 exactly, and neither a shift common to a row nor a mean of v costs digits. What rounding leaves of
// sum p (s_dot - shift - mean) is kept, too, and taken off in the end.
#pragma once

#include "passes/forward.hpp"

namespace attngrad::ATTNGRAD_ISA {

// What is known of the queries of a block so far, one number a lane.
template <class T>
struct OnlineTangent {
    T *top, *sum, *factor;   // as in the forward pass
    T *shift, *mean, *rest;  // s_dot at top; the mean of s_dot - shift; the sum of p (s_dot - shift - mean)
    T* slide;                // by how much factor * (shift + mean) has just moved
};

// `softmax`, with tangents: turns scores into p o M and z_dot into (p o (s_dot - shift - mean)) o M, in place.
template <class T, int NV>
__attribute__((noinline)) void softmax_tangent(const Scores<T> scores, T* s, T* d, long k0, Span keys, Span inner, int lane,
                                               const OnlineTangent<T>& rows) {
    constexpr int W = lanes<T>;
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
    Vec<T> m[NV], shift[NV], part[NV] = {}, part_dot[NV] = {};
    for (int v = 0; v < NV; ++v) {
        m[v] = load<T>(rows.top + lane + v * W);
        shift[v] = load<T>(rows.shift + lane + v * W);
    }
    each_key(keys, inner, scores.paths(false), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        const long at = (k - k0) * block<T> + lane;
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(s + at + v * W), x_dot = load<T>(d + at + v * W);
            if constexpr (modified<path>) {
                Modified<T> y{x};
                if constexpr (path == Path::biased) y.value = scores.add_bias(x, k, lane + v * W);
                if constexpr (path == Path::general) y = scores.apply(x, k, lane + v * W);
                x = y.value;
                x_dot = scores.tangent(x_dot, y.slope, k, lane + v * W);
            } else {
                if constexpr (path == Path::hidden) x = scores.hide(x, k, lane + v * W);
                x_dot = scores.plain_tangent(x_dot);
            }
            if constexpr (path != Path::clear) {
                x_dot = x == minus_inf ? Vec<T>{} : x_dot;
                store<T>(s + at + v * W, x);
            }
            store<T>(d + at + v * W, x_dot);
            const Int<T> larger = x > m[v];
            m[v] = larger ? x : m[v];
            shift[v] = larger ? x_dot : shift[v];
        }
    });
    for (int v = 0; v < NV; ++v) {
        const int at = lane + v * W;
        const Vec<T> old = load<T>(rows.top + at);
        store<T>(rows.top + at, m[v]);
        m[v] = m[v] == minus_inf ? Vec<T>{} : m[v];
        store<T>(rows.factor + at, exp2<T>(scores.exponent(old - m[v])));
    }
    each_key(keys, inner, scores.paths(false), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        const long at = (k - k0) * block<T> + lane;
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(s + at + v * W) - m[v];
            if constexpr (modified<path>) x = scores.exponent(x);
            const Vec<T> p = exp2<T>(x), x_dot = load<T>(d + at + v * W) - shift[v];
            part[v] += p;
            part_dot[v] += p * x_dot;
            store<T>(s + at + v * W, p);
            store<T>(d + at + v * W, x_dot);
        }
    });
    Vec<T> mean[NV], rest[NV] = {};
    for (int v = 0; v < NV; ++v) {
        const int at = lane + v * W;
        const Vec<T> factor = load<T>(rows.factor + at), old_sum = load<T>(rows.sum + at), before = old_sum * factor;
        const Vec<T> moved = shift[v] - load<T>(rows.shift + at), old = load<T>(rows.mean + at), all = before + part[v];
        const Vec<T> sum = (load<T>(rows.top + at) == minus_inf) & (all == all) ? Vec<T>{} : all;  // as in softmax()
        mean[v] = sum == Vec<T>{} ? Vec<T>{} : (part_dot[v] + before * (old - moved)) / sum;
        store<T>(rows.sum + at, sum);
        store<T>(rows.shift + at, shift[v]);
        store<T>(rows.mean + at, mean[v]);
        const Vec<T> slide = factor * (moved + (mean[v] - old));
        store<T>(rows.slide + at, slide);
        store<T>(rows.rest + at, load<T>(rows.rest + at) * factor - slide * old_sum);
    }
    const Path last = scores.drops() ? Path::general : Path::clear;
    each_key(keys, keys, {last, last}, [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        const long at = (k - k0) * block<T> + lane;
        for (int v = 0; v < NV; ++v) {
            Vec<T> p = load<T>(s + at + v * W), p_dot = p * (load<T>(d + at + v * W) - mean[v]);
            rest[v] += p_dot;
            if constexpr (path == Path::general) {
                const Vec<T> keep = scores.keep(k, lane + v * W);
                store<T>(s + at + v * W, p * keep);
                p_dot *= keep;
            }
            store<T>(d + at + v * W, p_dot);
        }
    });
    for (int v = 0; v < NV; ++v) {
        T* to = rows.rest + lane + v * W;
        store<T>(to, load<T>(to) + rest[v]);
    }
}

template <class T>
class ForwardTangent {
public:
    ForwardTangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, char* memory)
        : ForwardTangent(p, t, r, Cutter(memory)) {}
    static std::size_t bytes(const Problem& p, const Tangents& t) { return ForwardTangent(p, t, {}, Cutter(nullptr)).used_; }

    void run(std::int64_t b, std::int64_t key_head, std::int64_t first, int length, const Team& team) {
        q_.set(p_, b, key_head, first, length);
        pack_lanes<T>(p_.type, p_.q, q_, p_.D, Scores<T>::query_factor(p_), rows_, qt_);
        if (t_.q.data) pack_lanes<T>(p_.type, t_.q, q_, p_.D, Scores<T>::query_factor(p_), rows_, q_dot_t_);
        start();
        const Span seen = q_.all.outer;
        for (long k0 = seen.a / keys<T> * keys<T>; k0 < seen.b && !team.cancelled(); k0 += keys<T>) {
            const long k1 = std::min<long>(k0 + keys<T>, seen.b);
            if (scores_.prepare(q_, k0, k1)) tile(key_head, k0, k1);
        }
        finish();
    }

private:
    ForwardTangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, Cutter cut)
        : p_(p),
          t_(t),
          r_(r),
          rows_(cut.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          qt_(cut.take<T>(padded<T>(p.D) * block<T>)),
          q_dot_t_(t.q.data ? cut.take<T>(padded<T>(p.D) * block<T>) : nullptr),
          sums_(cut.take<T>(padded<T>(p.E) * block<T>)),
          sums_dot_(cut.take<T>(padded<T>(p.E) * block<T>)),
          st_(cut.take<T>(keys<T> * block<T>)),
          dt_(t.scores() ? cut.take<T>(keys<T> * block<T>) : nullptr),
          online_{cut.take<T>(block<T>), cut.take<T>(block<T>), cut.take<T>(block<T>), cut.take<T>(block<T>),
                  cut.take<T>(block<T>), cut.take<T>(block<T>), cut.take<T>(block<T>)},
          k_(p.type, p.D, false, cut),
          v_(p.type, p.E, true, cut),
          k_dot_(p.type, t.k.data ? p.D : 0, false, cut),
          v_dot_(p.type, t.v.data ? p.E : 0, true, cut),
          scores_(p, cut, t.bias),
          used_(cut.used()) {}

    // With a sink, the softmax starts from it: one more key, whose value is zero and whose s_dot is sigma_dot.
    void start() {
        constexpr T minus_inf = -std::numeric_limits<T>::infinity();
        for (int n = 0; n < q_.width; ++n) {
            const T top = p_.sinks ? Scores<T>::sink(p_, q_.head[n]) : minus_inf;
            online_.top[n] = top;
            online_.sum[n] = top == minus_inf ? 0 : 1;
            online_.shift[n] = t_.sinks && top != minus_inf ? static_cast<const T*>(t_.sinks)[q_.head[n]] : 0;
            online_.mean[n] = online_.rest[n] = online_.slide[n] = 0;
        }
        for (T* sums : {sums_, sums_dot_}) std::memset(sums, 0, sizeof(T) * q_.count * padded<T>(p_.E));
    }

    void tile(std::int64_t key_head, long k0, long k1) {
        k_.load(p_.k, q_.b, key_head, k0, k1);
        v_.load(p_.v, q_.b, key_head, k0, k1);
        if (t_.k.data) k_dot_.load(t_.k, q_.b, key_head, k0, k1);
        if (t_.v.data) v_dot_.load(t_.v, q_.b, key_head, k0, k1);
        for (int lane = 0; lane < q_.width; lane += panel<T>) {
            const Panel<T> panel(q_, lane, k0, k1);
            if (panel.blind()) continue;
            panel.parts([&](int vectors, int at, Span span) {
                const long row = (span.a - k0) * block<T> + at;
                k_.template dots<ToZero>(vectors, span, qt_ + at, st_ + row);  // (F1)
                if (dt_)
                    sum_of_dots<T>(vectors, span, at, t_.q.data ? &k_ : nullptr, q_dot_t_, t_.k.data ? &k_dot_ : nullptr, qt_,
                                   dt_ + row);  // (T1)
            });
            if (panel.whole) {
                weights(panel, panel.vectors, lane, panel.common, k0);
            } else {
                for (int n = 0; n < panel.vectors; ++n) weights(panel, 1, lane + n * lanes<T>, panel.own[n], k0);
            }
            for (int n = lane; n < std::min(lane + ATTNGRAD_ISA::panel<T>, q_.count); ++n) rescale(n);
            panel.parts([&](int vectors, int at, Span span) {
                const long row = (span.a - k0) * block<T> + at;
                const int count = std::min(vectors * lanes<T>, q_.count - at);
                const long first = at * padded<T>(p_.E);
                v_.template combine<ToC>(count, span, st_ + row, sums_ + first);               // (F5)
                if (dt_) v_.template combine<ToC>(count, span, dt_ + row, sums_dot_ + first);  // (T5)
                if (t_.v.data) v_dot_.template combine<ToC>(count, span, st_ + row, sums_dot_ + first);
            });
        }
    }

    void weights(const Panel<T>& panel, int vectors, int at, Span span, long k0) {
        if (dt_) {
            auto* with = vectors == 3 ? softmax_tangent<T, 3> : vectors == 2 ? softmax_tangent<T, 2> : softmax_tangent<T, 1>;
            return with(scores_, st_, dt_, k0, span, panel.inner, at, online_);
        }
        auto* without = vectors == 3 ? softmax<T, 3> : vectors == 2 ? softmax<T, 2> : softmax<T, 1>;
        without(scores_, st_ + at, k0, span, panel.inner, at, online_.top + at, online_.sum + at, online_.factor + at, T{1});
    }

    // The sums of one query follow its new maximum and shift.
    void rescale(int n) {
        const T factor = online_.factor[n], slide = online_.slide[n];
        if (factor == 1 && slide == 0) return;
        T *sums = sums_ + n * padded<T>(p_.E), *sums_dot = sums_dot_ + n * padded<T>(p_.E);
        for (long e = 0; e < padded<T>(p_.E); e += lanes<T>) {
            const Vec<T> x = load<T>(sums + e);
            store<T>(sums_dot + e, load<T>(sums_dot + e) * factor - slide * x);
            store<T>(sums + e, x * factor);
        }
    }

    void finish() {
        for (int n = 0; n < q_.width; n += lanes<T>)
            write_statistics<T>(p_, r_.f, q_.index(p_, n), q_.count - n, load<T>(online_.top + n), load<T>(online_.sum + n));
        for (int n = 0; n < q_.width; ++n) {
            const T inverse = online_.sum[n] == 0 ? 0 : 1 / online_.sum[n];
            online_.factor[n] = inverse;
            online_.rest[n] *= inverse;
            online_.mean[n] += online_.rest[n];
            if (n >= q_.count) continue;
            const std::int64_t at = q_.index(p_, n);
            static_cast<T*>(r_.lse_dot)[at] = online_.shift[n] + online_.mean[n];
            if (r_.shift) static_cast<T*>(r_.shift)[at] = online_.shift[n];
            if (r_.mean) static_cast<T*>(r_.mean)[at] = online_.mean[n];
        }
        for (int n = 0; n < q_.count && dt_; ++n) {
            const long first = n * padded<T>(p_.E);
            for (long e = first; e < first + padded<T>(p_.E); e += lanes<T>)
                store<T>(sums_dot_ + e, load<T>(sums_dot_ + e) - online_.rest[n] * load<T>(sums_ + e));
        }
        write_rows<T>(sums_, online_.factor, p_, q_, p_.E, r_.f.out, r_.f.wide_out);
        write_rows<T>(sums_dot_, online_.factor, p_, q_, p_.E, r_.out_dot, r_.wide_out_dot);
    }

    const Problem& p_;
    const Tangents& t_;
    ForwardTangentResult r_;
    Block<T> q_;
    T *rows_, *qt_, *q_dot_t_, *sums_, *sums_dot_, *st_, *dt_;
    OnlineTangent<T> online_;
    KeyTile<T> k_, v_, k_dot_, v_dot_;
    Scores<T> scores_;
    std::size_t used_;
};

template <class T>
void forward_tangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, Team& team) {
    if (p.B * p.Hq * p.T == 0) return;
    run_blocks<ForwardTangent<T>, T>(p, 6.0 * (p.D + p.E), team, ForwardTangent<T>::bytes(p, t),
                                     [&](char* memory) { return ForwardTangent<T>(p, t, r, memory); });
}

}  // namespace attngrad::ATTNGRAD_ISA
