#pragma once

#include <pybind11/pybind11.h>

void bind_errors(pybind11::module_& m);
void bind_base(pybind11::module_& m);
void bind_ckpt(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
