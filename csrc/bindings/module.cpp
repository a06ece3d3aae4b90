// The Python module: instruction sets and threads; the rest is in the other files of this folder, the only ones that know
// Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/gil.hpp"
#include "runtime/dispatch.hpp"

namespace nb = nanobind;
using namespace attngrad;

namespace {

nb::list isa_names() {
    nb::list names;
    for (const InstructionSet& set : instruction_sets())
        if (set.available) names.append(set.kernels->name);
    return names;
}

void set_isa(const std::string& name) {
    for (const InstructionSet& set : instruction_sets())
        if (set.available && name == set.kernels->name) {
            g_kernels = set.kernels;
            return;
        }
    throw nb::value_error(("no such instruction set on this machine: " + name).c_str());
}

// The sets of another module, which were compiled from the same headers.
void add_isas(const nb::capsule& sets) {
    const auto& more = *static_cast<const std::vector<InstructionSet>*>(sets.data("attngrad.instruction_sets"));
    instruction_sets().insert(instruction_sets().end(), more.begin(), more.end());
}

}  // namespace

NB_MODULE(_native, m) {
    if (PyInterpreterState_Get() != PyInterpreterState_Main())  // where it would wait for the GIL of the main one forever
        throw nb::import_error("attngrad: cannot be imported in a sub-interpreter. Import it in the main interpreter.");
    nb::set_leak_warnings(false);  // what daemon threads work on when the interpreter ends is never freed
    for (const InstructionSet& set : instruction_sets()) {
        if (!set.available) continue;
        g_kernels = set.kernels;
        break;
    }
    g_threads = default_threads();

    m.attr("compiler") = __VERSION__;
    m.def("isa_names", &isa_names);
    m.def("isa", [] { return g_kernels.load()->name; });
    m.def("set_isa", &set_isa);
    m.def("add_isas", &add_isas, nb::arg("sets"));
    m.def("set_num_threads", [](int n) { g_threads = n; });
    m.def("get_num_threads", [] { return g_threads.load(); });
    bind_tools(m);
    bind_loans(m);
    bind_tensors(m);
    bind_passes(m);
}
