// The four passes over NumPy arrays. Arguments come checked; outputs are allocated by the caller, and None is one that is not
// wanted or not there.
#include "bindings/bind.hpp"
#include "bindings/gil.hpp"
#include "bindings/problem.hpp"

namespace attngrad {
namespace {

// The inputs and options of a call, as one Python object that serves several passes.
struct Call : OwnedProblem {
    Call(const Array& q, const Array& k, const Array& v, const nb::dict& fields) {
        p.type = type_of(q);
        p.B = q.shape(0);
        p.Hq = q.shape(1);
        p.T = q.shape(2);
        p.D = q.shape(3);
        p.Hk = k.shape(1);
        p.S = k.shape(2);
        p.E = v.shape(3);
        p.q = rows_of(q);
        p.k = rows_of(k);
        p.v = rows_of(v);
        alive = {q, k, v};
        set_fields("attngrad._native.Call", fields, true);
    }
};

// The directions of forward mode.
struct Directions {
    Tangents t;
    std::vector<Array> alive;

    Directions(const Array& q, const Array& k, const Array& v, const Array& bias, const Array& sinks) {
        t.q = rows_of(q);
        t.k = rows_of(k);
        t.v = rows_of(v);
        if (bias.is_valid()) t.bias = plane_of(bias, type_of(bias));
        t.sinks = data_of(sinks);
        alive = {q, k, v, bias, sinks};
    }
    Directions(const Directions&) = delete;
};

ForwardResult forward_result(const Output& out, const Output& wide_out, const Output& lse, const Output& row_max,
                             const Output& inv_row_sum) {
    return {data_of(out), data_of(wide_out), data_of(lse), data_of(row_max), data_of(inv_row_sum)};
}

void forward(const Call& call, Output out, Output wide_out, Output lse, Output row_max, Output inv_row_sum) {
    const ForwardResult r = forward_result(out, wide_out, lse, row_max, inv_row_sum);
    run([&](const Kernels& kernels, ParallelCall& parallel) { kernels.passes(call.p.type).forward(call.p, r, parallel); });
}

void forward_tangent(const Call& call, const Directions& directions, Output out, Output wide_out, Output lse, Output row_max,
                     Output inv_row_sum, Output out_dot, Output wide_out_dot, Output lse_dot, Output tangent_shift,
                     Output tangent_mean) {
    const ForwardTangentResult r{forward_result(out, wide_out, lse, row_max, inv_row_sum),
                                 data_of(out_dot),
                                 data_of(wide_out_dot),
                                 data_of(lse_dot),
                                 data_of(tangent_shift),
                                 data_of(tangent_mean)};
    run([&](const Kernels& kernels, ParallelCall& parallel) {
        kernels.passes(call.p.type).forward_tangent(call.p, directions.t, r, parallel);
    });
}

// Whether a plane has a number for every score. Then the caller need not have zeroed it.
bool has_every_score(const Problem& p, const Array& plane) {
    const std::int64_t scores[4] = {p.B, p.Hq, p.T, p.S};
    for (int axis = 0; axis < 4; ++axis)
        if (static_cast<std::int64_t>(plane.shape(axis)) != scores[axis]) return false;
    return p.S > 1;
}

BackwardProblem backward_problem(const Call& call, const Array& dout, const Array& dlse, const Array& out, const Array& row_max,
                                 const Array& inv_row_sum, const Output& dq, const Output& dk, const Output& dv,
                                 const Output& delta, const Array& dbias) {
    const Plane plane = plane_of(dbias, Type::f32);
    return {rows_of(dout),
            data_of(dlse),
            data_of(out),
            data_of(row_max),
            data_of(inv_row_sum),
            data_of(dq),
            data_of(dk),
            data_of(dv),
            data_of(delta),
            plane,
            plane && has_every_score(call.p, dbias)};
}

void backward(const Call& call, Array dout, Array dlse, Array out, Array row_max, Array inv_row_sum, Output dq, Output dk,
              Output dv, Output delta, Array dbias) {
    const BackwardProblem g = backward_problem(call, dout, dlse, out, row_max, inv_row_sum, dq, dk, dv, delta, dbias);
    run([&](const Kernels& kernels, ParallelCall& parallel) { kernels.passes(call.p.type).backward(call.p, g, parallel); });
}

void backward_tangent(const Call& call, const Directions& directions, Array dout, Array dlse, Array out, Array row_max,
                      Array inv_row_sum, Output dq, Output dk, Output dv, Output delta, Array dbias, Array dout_dot,
                      Array dlse_dot, Array out_dot, Array tangent_shift, Array tangent_mean, Output dq_dot, Output dk_dot,
                      Output dv_dot, Output delta_dot, Array dbias_dot) {
    const BackwardTangentProblem g{backward_problem(call, dout, dlse, out, row_max, inv_row_sum, dq, dk, dv, delta, dbias),
                                   rows_of(dout_dot),
                                   data_of(dlse_dot),
                                   data_of(out_dot),
                                   data_of(tangent_shift),
                                   data_of(tangent_mean),
                                   data_of(dq_dot),
                                   data_of(dk_dot),
                                   data_of(dv_dot),
                                   data_of(delta_dot),
                                   plane_of(dbias_dot, Type::f32)};
    run([&](const Kernels& kernels, ParallelCall& parallel) {
        kernels.passes(call.p.type).backward_tangent(call.p, directions.t, g, parallel);
    });
}

}  // namespace

void bind_passes(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    const auto none = [](const char* name) { return nb::arg(name).noconvert().none(); };
    nb::class_<Call>(m, "Call")
        .def(nb::init<const Array&, const Array&, const Array&, const nb::dict&>(), array("q"), array("k"), array("v"),
             nb::arg("fields"))
        .def("forward", &forward, none("out"), none("wide_out"), none("lse"), none("row_max"), none("inv_row_sum"))
        .def("backward", &backward, none("dout"), none("dlse"), none("out"), none("row_max"), none("inv_row_sum"), none("dq"),
             none("dk"), none("dv"), none("delta"), none("dbias"))
        .def("forward_tangent", &forward_tangent, nb::arg("directions"), none("out"), none("wide_out"), none("lse"),
             none("row_max"), none("inv_row_sum"), none("out_dot"), none("wide_out_dot"), none("lse_dot"),
             none("tangent_shift"), none("tangent_mean"))
        .def("backward_tangent", &backward_tangent, nb::arg("directions"), none("dout"), none("dlse"), none("out"),
             none("row_max"), none("inv_row_sum"), none("dq"), none("dk"), none("dv"), none("delta"), none("dbias"),
             none("dout_dot"), none("dlse_dot"), none("out_dot"), none("tangent_shift"), none("tangent_mean"), none("dq_dot"),
             none("dk_dot"), none("dv_dot"), none("delta_dot"), none("dbias_dot"));
    nb::class_<Directions>(m, "Directions")
        .def(nb::init<const Array&, const Array&, const Array&, const Array&, const Array&>(), none("q"), none("k"), none("v"),
             none("bias"), none("sinks"));
}

}  // namespace attngrad
