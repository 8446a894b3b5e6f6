#include "bindings.h"
#include "memory.h"
#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/base/parallel.h"
#include "zc/device/kernels.h"

namespace py = pybind11;

namespace {

void cast(zc::BufferView in, zc::BufferView out) {
  ZC_CHECK(in.numel == out.numel && zc::is_floating(in.dtype) && zc::is_floating(out.dtype), kInternal,
           "[base] cast: got ", in.numel, " and ", out.numel,
           " elements, expected equally many, of fp32, fp16 or bf16");
  zc::device::cpu_kernels().cast(in, out, {});
}

}  // namespace

void bind_base(py::module_& m) {
  py::enum_<zc::DType>(m, "DType")
      .value("fp32", zc::DType::kF32)
      .value("fp16", zc::DType::kF16)
      .value("bf16", zc::DType::kBF16)
      .value("int64", zc::DType::kI64)
      .value("uint8", zc::DType::kU8);

  py::class_<zc::BufferView>(m, "BufferView", "A typed range of host memory at an address. Keeps nothing alive.")
      .def(py::init([](std::uintptr_t address, std::int64_t numel, zc::DType dtype) {
             return zc::BufferView{reinterpret_cast<void*>(address), numel, dtype, {}};
           }),
           py::arg("address"), py::arg("numel"), py::arg("dtype"))
      .def_readonly("numel", &zc::BufferView::numel)
      .def_readonly("dtype", &zc::BufferView::dtype);

  m.def("cast", &cast, py::call_guard<py::gil_scoped_release>(), py::arg("source"), py::arg("out"),
        "Converts fp32, fp16 or bf16 elements to another of these, rounded to nearest even.");

  py::class_<PyMemory>(m, "Memory", py::buffer_protocol(), "Memory of the core, as a writable buffer of bytes.")
      .def_buffer([](PyMemory& self) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(self.memory.get()), self.bytes);
      });
  m.def("set_num_threads", &zc::set_num_threads, py::arg("num_threads"),
        "How many threads loops over memory use from now on, at most one a core that this process may run on.");
  m.def("begin_direct_allocations", &zc::begin_direct_allocations);
  m.def("end_direct_allocations", &zc::end_direct_allocations);
}
