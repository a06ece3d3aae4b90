// The parts of the module, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace attngrad {

void bind_passes(nanobind::module_& m);   // the passes over arrays
void bind_tensors(nanobind::module_& m);  // those over a framework's tensors
void bind_tools(nanobind::module_& m);    // memory, dropout masks, rounding, probes of the machine
void bind_loans(nanobind::module_& m);    // workers from elsewhere, and for others

}  // namespace attngrad
