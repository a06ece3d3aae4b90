// The only file that knows Python. Arguments come checked; outputs are allocated by the caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "philox.hpp"

namespace nb = nanobind;

namespace {

using Mask = nb::ndarray<bool, nb::shape<-1, -1, -1, -1>, nb::c_contig, nb::device::cpu>;

void keep_mask(Mask out, std::uint64_t seed, std::uint32_t threshold, std::int64_t b0, std::int64_t h0,
               std::int64_t i0, std::int64_t j0) {
    const auto batches = static_cast<std::int64_t>(out.shape(0)), heads = static_cast<std::int64_t>(out.shape(1));
    const auto queries = static_cast<std::int64_t>(out.shape(2)), keys = static_cast<std::int64_t>(out.shape(3));
    bool* row = out.data();
    nb::gil_scoped_release release;
    for (std::int64_t b = 0; b < batches; ++b)
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t i = 0; i < queries; ++i, row += keys)
                attngrad::keep_row(row, keys, {b0 + b, h0 + h, i0 + i, j0}, seed, threshold);
}

}  // namespace

NB_MODULE(_native, m) {
    m.attr("compiler") = __VERSION__;
    m.def("keep_mask", &keep_mask, nb::arg("out").noconvert(), nb::arg("seed"), nb::arg("threshold"), nb::arg("b0"),
          nb::arg("h0"), nb::arg("i0"), nb::arg("j0"));
}
