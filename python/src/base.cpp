#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "memory.h"
#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/base/parallel.h"
#include "zc/base/trace.h"
#include "zc/device/kernels.h"

namespace py = pybind11;

namespace {

void cast(zc::BufferView in, zc::BufferView out) {
  ZC_CHECK(in.numel == out.numel && zc::is_floating(in.dtype) && zc::is_floating(out.dtype), kInternal,
           "[base] cast: got ", in.numel, " and ", out.numel,
           " elements, expected equally many, of fp32, fp16 or bf16");
  zc::device::cpu_kernels().cast(in, out, {});
}

// A scope that Python opens and closes.
struct PyTraceScope {
  explicit PyTraceScope(std::string name) : label(std::move(name)) {}
  std::string label;
  std::optional<zc::trace::Scope> scope{};
};

py::tuple stop_trace() {
  zc::trace::Recording recording;
  {
    py::gil_scoped_release unlocked;
    recording = zc::trace::stop();
  }
  py::list events;
  for (const zc::trace::Event& event : recording.events) {
    const py::object label = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(event.label, static_cast<py::ssize_t>(std::strlen(event.label)), "replace"));
    events.append(py::make_tuple(event.begin_ns, event.end_ns, event.thread, event.in_flight, event.kind, label));
  }
  return py::make_tuple(events, recording.dropped);
}

void bind_trace(py::module_& m) {
  py::class_<PyTraceScope>(m, "TraceScope", "A phase of the step: with TraceScope('forward'): ...")
      .def(py::init<std::string>(), py::arg("label"))
      .def("__enter__", [](PyTraceScope& self) { self.scope.emplace("phase", self.label); })
      .def("__exit__", [](PyTraceScope& self, const py::args&) { self.scope.reset(); });
  m.def("start_trace", &zc::trace::start, py::arg("capacity"), "False when a recording is under way.");
  m.def("stop_trace", &stop_trace,
        "([(begin ns, end ns, thread, in flight, kind, label)], number of events that found no room).");
}

}  // namespace

void bind_base(py::module_& m) {
  py::enum_<zc::DType>(m, "DType")
      .value("fp32", zc::DType::kF32)
      .value("fp16", zc::DType::kF16)
      .value("bf16", zc::DType::kBF16)
      .value("int64", zc::DType::kI64)
      .value("uint8", zc::DType::kU8);

  py::class_<zc::BufferView>(m, "BufferView", "A typed range of memory at an address. Keeps nothing alive.")
      .def(py::init([](std::uintptr_t address, std::int64_t numel, zc::DType dtype, int cuda_index) {
             const zc::DeviceId cuda{zc::DeviceType::kCuda, cuda_index};
             return zc::BufferView{reinterpret_cast<void*>(address), numel, dtype,
                                   cuda_index < 0 ? zc::DeviceId{} : cuda};
           }),
           py::arg("address"), py::arg("numel"), py::arg("dtype"), py::arg("cuda_index") = -1,
           "cuda_index: of the device whose memory it is; -1: the host's.")
      .def_readonly("numel", &zc::BufferView::numel)
      .def_readonly("dtype", &zc::BufferView::dtype);

  m.def("cast", &cast, py::call_guard<py::gil_scoped_release>(), py::arg("source"), py::arg("out"),
        "Converts fp32, fp16 or bf16 elements to another of these, rounded to nearest even.");

  py::class_<PyMemory>(m, "Memory", py::buffer_protocol(),
                       "Memory of the core, as a writable buffer of bytes where it is the host's.")
      .def_buffer([](PyMemory& self) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(self.memory.get()), self.bytes);
      })
      .def_property_readonly("address",
                             [](const PyMemory& self) { return reinterpret_cast<std::uintptr_t>(self.memory.get()); })
      .def_readonly("bytes", &PyMemory::bytes);
  m.def("set_num_threads", &zc::set_num_threads, py::arg("num_threads"),
        "How many threads loops over memory use from now on, at most one a core that this process may run on.");
  bind_trace(m);
  m.def("begin_direct_allocations", &zc::begin_direct_allocations);
  m.def("end_direct_allocations", &zc::end_direct_allocations);
}
