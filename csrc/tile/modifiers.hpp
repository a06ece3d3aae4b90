// Score modifiers: functions of one score, applied after scale q k^T and before bias and mask, with their derivatives.
//
// To add one: a field of Problem, its name in bindings/problem.cpp, and here a struct like SoftCap and its place in the list.
#pragma once

#include <concepts>
#include <tuple>
#include <utility>

#include "runtime/problem.hpp"
#include "simd/vec.hpp"

namespace attngrad::ATTNGRAD_ISA {

// s = m(z) and its derivatives at a vector of arguments. The argument is held as x = z / argument_unit, the value as
// s / value_unit; slope = ds/dz, bend = d slope / dx = argument_unit d2s/dz2.
template <class T>
struct Modified {
    Vec<T> value, slope{}, bend{};
};

// What is not asked for of the result of operator() costs nothing: it is inlined.
template <class M, class T>
concept ScoreModifier = requires(const Problem& p, const M& m, Vec<T> x) {
    { M::active(p) } -> std::same_as<bool>;
    { M::argument_unit(p) } -> std::same_as<double>;  // where active
    { M::value_unit(p) } -> std::same_as<double>;
    M(p);
    { m(x) } -> std::same_as<Modified<T>>;
};

// s = c tanh(z / c).
template <class T>
struct SoftCap {
    static bool active(const Problem& p) { return p.softcap > 0; }
    static double argument_unit(const Problem& p) { return p.softcap; }
    static double value_unit(const Problem& p) { return p.softcap; }

    explicit SoftCap(const Problem&) {}
    ATTNGRAD_INLINE Modified<T> operator()(Vec<T> x) const {
        const Tanh<T> t = tanh<T>(x);
        return {t.value, t.slope, static_cast<T>(-2) * t.value * t.slope};
    }
};

// Modifiers one after the other, those that are not active left out.
template <class T, ScoreModifier<T>... M>
class ModifierChain {
public:
    static bool active(const Problem& p) { return (M::active(p) || ...); }
    // The unit of the argument of the first that is active.
    static double argument_unit(const Problem& p) {
        double unit = 1;
        (void)((M::active(p) && (unit = M::argument_unit(p), true)) || ...);
        return unit;
    }

    // The score is left as s * `unit`.
    ModifierChain(const Problem& p, double unit) : modifiers_(M(p)...) {
        constexpr int count = sizeof...(M);
        const bool on[] = {M::active(p)...};
        const double arguments[] = {M::argument_unit(p)...}, values[] = {M::value_unit(p)...}, first = argument_unit(p);
        for (int i = 0; i < count; ++i) {
            int next = i + 1;
            while (next < count && !on[next]) ++next;
            active_[i] = on[i];
            factor_[i] = static_cast<T>(next < count ? values[i] / arguments[next] : values[i] * unit);
            stretch_[i] = static_cast<T>(on[i] ? first / arguments[i] : 1);
        }
    }

    ATTNGRAD_INLINE bool active() const {
        return [&]<int... i>(std::integer_sequence<int, i...>) ATTNGRAD_LAMBDA { return (active_[i] || ...); }(indices);
    }

    // The value, times `unit`; slope and bend by the chain rule: for s = m2(m1(z)),
    // slope = m2' m1' and bend = m2'' m1'^2 + m2' m1''.
    ATTNGRAD_INLINE Modified<T> operator()(Vec<T> x) const {
        Modified<T> all{x};
        bool first = true;
        [&]<int... i>(std::integer_sequence<int, i...>) ATTNGRAD_LAMBDA { (step<i>(all, first), ...); }(indices);
        return all;
    }

private:
    static constexpr auto indices = std::make_integer_sequence<int, sizeof...(M)>{};

    template <int i>
    ATTNGRAD_INLINE void step(Modified<T>& all, bool& first) const {
        if (!active_[i]) return;
        const Modified<T> next = std::get<i>(modifiers_)(all.value);
        if (i == 0 || first) {
            all.slope = next.slope;
            all.bend = next.bend;
        } else {  // stretch: from the unit of the first argument to that of this one
            all.bend = next.bend * all.slope * all.slope * stretch_[i] + next.slope * all.bend;
            all.slope *= next.slope;
        }
        all.value = next.value * factor_[i];
        first = false;
    }

    std::tuple<M...> modifiers_;
    T factor_[sizeof...(M)], stretch_[sizeof...(M)];
    bool active_[sizeof...(M)];
};

// The list, in the order of application.
template <class T>
using Modifiers = ModifierChain<T, SoftCap<T>>;

}  // namespace attngrad::ATTNGRAD_ISA
