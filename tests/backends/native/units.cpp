// The parts that every kernel is made of, each against a plain computation in higher precision: exp2, log and tanh in units of
// the last place over their range, the conversions of storage, score modifiers and their derivatives, the product. Prints what
// it found; exits with 1 where a bound is broken. tests/backends/test_native_units.py compiles it for each instruction set of
// the machine, and with sanitizers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "simd/storage.hpp"
#include "tile/modifiers.hpp"
#include "tile/product.hpp"

namespace attngrad::ATTNGRAD_ISA {
namespace {

bool failed = false;

void expect(const char* what, double found, double bound) {
    const bool holds = found <= bound;  // NaN does not
    std::printf("%-28s %8.3f of %g%s\n", what, found, bound, holds ? "" : "  BROKEN");
    failed = failed || !holds;
}
void expect(const char* what, bool holds) { expect(what, holds ? 0 : 1, 0); }

// |x - truth| in units of the last place of the truth.
template <class T>
double ulps(T x, long double truth) {
    const T near = static_cast<T>(truth);
    const T unit = std::nextafter(std::abs(near), std::numeric_limits<T>::infinity()) - std::abs(near);
    return static_cast<double>(std::abs(static_cast<long double>(x) - truth) / unit);
}

// The largest error of `f`, which takes a vector, over numbers from `low` to `high`.
template <class T, class F, class Truth>
double worst(T low, T high, F f, Truth truth) {
    constexpr int W = lanes<T>, rounds = 100'000;
    double most = 0;
    for (int n = 0; n < rounds; ++n) {
        T x[W], y[W];
        for (int i = 0; i < W; ++i) x[i] = low + (high - low) * static_cast<T>(n * W + i) / static_cast<T>(rounds * W - 1);
        store<T>(y, f(load<T>(x)));
        for (int i = 0; i < W; ++i) {
            const double error = ulps<T>(y[i], truth(static_cast<long double>(x[i])));
            if (!(error <= most)) most = error;
        }
    }
    return most;
}

template <class T, class F>
T one(F f, T x) {
    return f(broadcast<T>(x))[0];
}

template <class T>
void functions() {
    const T low = Exp2<T>::low, inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    const auto exact_exp2 = [](long double x) { return std::exp2(x); };
    const auto power = [](Vec<T> x) { return exp2<T>(x); };
    expect("exp2, below 0", worst<T>(low, 0, power, exact_exp2), 1.25);
    expect("exp2, above 0", worst<T>(0, -low, power, exact_exp2), 1.25);
    expect("exp2 below its range is 0", one<T>(power, std::nextafter(low, -inf)) == 0 && one<T>(power, -inf) == 0);
    expect("exp2 keeps NaN", std::isnan(one<T>(power, nan)));
    expect("exp2 of 0 is 1", one<T>(power, 0) == 1);

    const auto logarithm = [](Vec<T> x) { return log<T>(x); };
    const auto exact_log = [](long double x) { return std::log(x); };
    expect("log, up to 100", worst<T>(static_cast<T>(1.5), 100, logarithm, exact_log), 2);
    expect("log, large", worst<T>(1e6, static_cast<T>(1e30), logarithm, exact_log), 2);
    expect("log of 1 is 0", one<T>(logarithm, 1) == 0);
    expect("log keeps NaN", std::isnan(one<T>(logarithm, nan)));

    const auto value = [](Vec<T> x) { return tanh<T>(x).value; };
    const auto slope = [](Vec<T> x) { return tanh<T>(x).slope; };
    const auto exact_slope = [](long double x) { return 1 / (std::cosh(x) * std::cosh(x)); };
    for (const T end : {static_cast<T>(1e-3), static_cast<T>(1), static_cast<T>(30)}) {
        expect("tanh", worst<T>(-end, end, value, [](long double x) { return std::tanh(x); }), 4);
        expect("slope of tanh", worst<T>(-end, end, slope, exact_slope), 5 + 2 * end);  // the argument of exp is rounded
    }
    expect("tanh of infinities", one<T>(value, inf) == 1 && one<T>(value, -inf) == -1);
    expect("slope where tanh is reached", one<T>(slope, inf) == 0 && one<T>(slope, static_cast<T>(1e6)) == 0);
}

// A 16-bit number of `exponent` and `fraction` bits, read by its definition.
double read(std::uint16_t bits, int exponent, int fraction) {
    const int e = bits >> fraction & ((1 << exponent) - 1), f = bits & ((1 << fraction) - 1), bias = (1 << (exponent - 1)) - 1;
    const double sign = bits >> 15 ? -1 : 1;
    if (e == (1 << exponent) - 1) return f ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    return sign * std::ldexp(e ? 1 + std::ldexp(f, -fraction) : std::ldexp(f, 1 - fraction), (e ? e : 0) - bias);
}

bool same(double a, double b) { return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b)); }

template <class S>
void storage(const char* name, int exponent, int fraction) {
    std::printf("%s\n", name);
    bool widens = true, returns = true, nearest = true;
    for (unsigned bits = 0; bits < 65536; ++bits) {
        const S x{static_cast<std::uint16_t>(bits)};
        const float wide = widen(x);
        widens = widens && same(wide, read(x.bits, exponent, fraction));
        S back;
        narrow(wide, back);
        returns = returns && (std::isnan(wide) ? std::isnan(widen(back)) : back.bits == x.bits);
    }
    expect("every number is widened", widens);
    expect("and narrowed to itself", returns);
    // Between neighbours a < b, positive and finite: their middle goes to the even one, what is beside it to the nearer one.
    const std::uint16_t infinity = static_cast<std::uint16_t>(((1 << exponent) - 1) << fraction);
    for (std::uint16_t bits = 0; bits < infinity; ++bits) {
        const double a = read(bits, exponent, fraction), b = read(bits + 1, exponent, fraction);
        const double step =
            bits + 1 < infinity ? b - a : a - read(bits - 1, exponent, fraction);  // past the largest, as below it
        const float middle = static_cast<float>(a + step / 2);
        const std::uint16_t even = bits % 2 ? bits + 1 : bits;
        const auto rounds_to = [&](float x, std::uint16_t expected) {
            S y;
            narrow(x, y);
            S z;
            narrow(-x, z);
            return y.bits == expected && z.bits == (expected | 0x8000);
        };
        if (static_cast<double>(middle) != a + step / 2) continue;  // bfloat16 beyond the range of float
        nearest = nearest && rounds_to(middle, even) && rounds_to(std::nextafter(middle, 0.0f), bits) &&
                  rounds_to(std::nextafter(middle, std::numeric_limits<float>::infinity()), bits + 1);
    }
    expect("to nearest, ties to even", nearest);
}

template <class T, int NV, Order order, class To>
double product_error() {
    constexpr int W = lanes<T>;
    std::mt19937 random(0);
    std::uniform_int_distribution<int> small(-8, 8);  // sums of products of these are exact
    double most = 0;
    for (long rows = 0; rows <= 29; ++rows)
        for (const long depth : {0L, 1L, 2L, 7L, 33L}) {
            const long a_stride = (order == Order::RowMajor ? depth : rows) + 3, b_stride = NV * W + 5, c_stride = NV * W + 2;
            std::vector<T> a((order == Order::RowMajor ? rows : depth) * a_stride), b(depth * b_stride), c(rows * c_stride),
                factor(rows);
            for (auto* x : {&a, &b, &c, &factor})
                for (T& y : *x) y = static_cast<T>(small(random));
            std::vector<T> expected = c;
            for (long m = 0; m < rows; ++m)
                for (long j = 0; j < NV * W; ++j) {
                    T sum = 0;
                    for (long k = 0; k < depth; ++k)
                        sum += (order == Order::RowMajor ? a[m * a_stride + k] : a[k * a_stride + m]) * b[k * b_stride + j];
                    T& to = expected[m * c_stride + j];
                    if constexpr (std::is_same_v<To, ToZero>) to = sum;
                    if constexpr (std::is_same_v<To, ToC>) to += sum;
                    if constexpr (std::is_same_v<To, ScaledToZero>) to = sum * factor[m];
                    if constexpr (std::is_same_v<To, ScaledToC>) to = (to + sum) * factor[m];
                    if constexpr (std::is_same_v<To, ToScaledC>) to = to * factor[m] + sum;
                }
            product<T, order, To>(NV, rows, depth, Matrix<const T>{a.data(), a_stride}, Matrix<const T>{b.data(), b_stride},
                                  Matrix<T>{c.data(), c_stride}, factor.data());
            for (std::size_t i = 0; i < c.size(); ++i) most = std::max(most, std::abs(static_cast<double>(c[i] - expected[i])));
        }
    return most;
}

template <class T, int NV>
void products() {
    double most = 0;
    const auto both = [&]<class To>(To) {
        most = std::max({most, product_error<T, NV, Order::RowMajor, To>(), product_error<T, NV, Order::ColMajor, To>()});
    };
    both(ToZero{}), both(ToC{}), both(ScaledToZero{}), both(ScaledToC{}), both(ToScaledC{});
    expect("product", most, 0);
}

// s = z + z^2 / 6, its argument in units of 3, its value in units of 2. On where `causal` is, for want of a field.
template <class T>
struct Bent {
    static bool active(const Problem& p) { return p.causal; }
    static double argument_unit(const Problem&) { return 3; }
    static double value_unit(const Problem&) { return 2; }
    explicit Bent(const Problem&) {}
    Modified<T> operator()(Vec<T> x) const {
        const Vec<T> z = x * static_cast<T>(3);
        return {(z + z * z / static_cast<T>(6)) / static_cast<T>(2), 1 + z / static_cast<T>(3), broadcast<T>(1)};
    }
};

struct Exact {  // a function and two derivatives
    long double value, slope = 1, bend = 0;
    Exact then(const Exact& next) const {
        return {next.value, next.slope * slope, next.bend * slope * slope + next.slope * bend};
    }
    Exact capped(long double c) const {
        const long double t = std::tanh(value / c);
        return then({c * t, 1 - t * t, -2 * t * (1 - t * t) / c});
    }
    Exact bent() const { return then({value + value * value / 6, 1 + value / 3, 1.0L / 3}); }
};

// The largest relative error of values, slopes and bends of modifiers one after the other.
template <class T, template <class> class... M>
double chain_error(const Problem& p, Exact (*exact)(Exact, const Problem&)) {
    using Chain = ModifierChain<T, M<T>...>;
    const double unit = 1.25, argument = Chain::argument_unit(p);
    const Chain chain(p, unit);
    double most = 0;
    for (double z = -2; z <= 2; z += 1.0 / 64) {
        const Modified<T> found = chain(broadcast<T>(static_cast<T>(z / argument)));
        const Exact truth = exact({z}, p);
        const auto differ = [&](double x, long double y) {
            const double error = static_cast<double>(std::abs(x - y) / (1 + std::abs(y)));
            if (!(error <= most)) most = error;
        };
        differ(found.value[0] / unit, truth.value);
        differ(found.slope[0], truth.slope);
        differ(found.bend[0] / argument, truth.bend);
    }
    return most / std::numeric_limits<T>::epsilon();
}

template <class T>
void modifiers() {
    for (const bool cap : {false, true})
        for (const bool bend : {false, true}) {
            if (!cap && !bend) continue;
            Problem p;
            p.softcap = cap ? 2.5 : 0;
            p.causal = bend;
            const auto cap_first = [](Exact z, const Problem& p) {
                if (p.softcap > 0) z = z.capped(p.softcap);
                return p.causal ? z.bent() : z;
            };
            const auto cap_last = [](Exact z, const Problem& p) {
                if (p.causal) z = z.bent();
                return p.softcap > 0 ? z.capped(p.softcap) : z;
            };
            expect("modifiers, cap first", chain_error<T, SoftCap, Bent>(p, cap_first), 8);
            expect("modifiers, cap last", chain_error<T, Bent, SoftCap>(p, cap_last), 8);
        }
    const Problem none;
    expect("no modifier",
           !Modifiers<T>::active(none) && one<T>([&](Vec<T> x) { return Modifiers<T>(none, 1)(x).value; }, 3) == 3);
}

int run() {
    std::printf("float\n");
    functions<float>();
    std::printf("double\n");
    functions<double>();
    storage<Half>("half", 5, 10);
    storage<BFloat16>("bfloat16", 8, 7);
    modifiers<float>(), modifiers<double>();
    products<float, 1>(), products<float, 2>(), products<float, 3>();
    products<double, 1>(), products<double, 2>(), products<double, 3>();
    if constexpr (registers == 32) products<float, 4>(), products<double, 4>();
    return failed;
}

}  // namespace
}  // namespace attngrad::ATTNGRAD_ISA

int main() { return attngrad::ATTNGRAD_ISA::run(); }
