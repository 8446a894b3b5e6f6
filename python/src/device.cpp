#include "zc/device/device.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "memory.h"
#include "zc/cuda/backend.h"

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using zc::device::Device;

namespace {

// Bytes at an address, in host memory or the device's, and which of them that is.
zc::BufferView bytes_at(std::uintptr_t address, std::int64_t bytes, zc::DeviceId device) {
  return {reinterpret_cast<void*>(address), bytes, zc::DType::kU8, device};
}

}  // namespace

void bind_device(py::module_& m) {
  py::class_<Device, std::unique_ptr<Device, py::nodelete>>(m, "Device", "Where model states lie and kernels run.")
      .def_property_readonly("runs_behind", &Device::runs_behind)
      .def(
          "to_host",
          [](Device& self, std::uintptr_t from, std::uintptr_t to, std::int64_t bytes, std::uintptr_t after) {
            const zc::device::Stream stream{reinterpret_cast<void*>(after)};
            self.copy(bytes_at(from, bytes, self.id()), bytes_at(to, bytes, {}), stream);
            self.synchronize(stream);
          },
          NoGil(), py::arg("source"), py::arg("to"), py::arg("bytes"), py::arg("stream"),
          "Copies this device's memory, as the stream leaves it. Blocks.")
      .def(
          "from_host",
          [](Device& self, std::uintptr_t from, std::uintptr_t to, std::int64_t bytes, std::uintptr_t after) {
            const zc::device::Stream stream{reinterpret_cast<void*>(after)};
            self.copy(bytes_at(from, bytes, {}), bytes_at(to, bytes, self.id()), stream);
            self.synchronize(stream);
          },
          NoGil(), py::arg("source"), py::arg("to"), py::arg("bytes"), py::arg("stream"),
          "Copies to this device's memory, in the order of the stream. Blocks.")
      .def(
          "synchronize",
          [](Device& self, std::uintptr_t stream) { self.synchronize({reinterpret_cast<void*>(stream)}); }, NoGil(),
          py::arg("stream") = 0)
      .def(
          "allocate_pinned",
          [](Device& self, std::int64_t bytes) { return PyMemory{self.allocate_pinned(bytes), bytes}; }, NoGil(),
          py::arg("bytes"), "Host memory that it copies from and to at full speed.");
  m.def("cpu_device", &zc::device::cpu_device, py::return_value_policy::reference);
  m.def("plan_device", &zc::device::plan_device, py::return_value_policy::reference);
  m.def("cuda_device", &zc::cuda::device, py::return_value_policy::reference, py::arg("index"));
  m.def(
      "cuda_status",
      [] {
        const zc::cuda::Status status = zc::cuda::status();
        return py::make_tuple(status.built, status.num_devices, status.text);
      },
      "(whether this build has the CUDA backend, how many devices it sees, that in words). Creates no context.");
  m.def(
      "wait_until_devices_are_idle",
      [](std::int64_t limit_ms) { return zc::cuda::wait_until_idle(std::chrono::milliseconds(limit_ms)); }, NoGil(),
      py::arg("limit_ms"), "Until no collective of this process is under way on a device; False: it took longer.");
  m.def("nccl", &zc::cuda::nccl, NoGil(), py::arg("path"),
        "Version and file of the NCCL that device_communicator takes.");
  m.def(
      "device_communicator",
      [](std::shared_ptr<zc::comm::Communicator> host, Device& device, bool fast_reduction, std::string nccl_path) {
        return zc::cuda::make_communicator(std::move(host), device, {fast_reduction, std::move(nccl_path)});
      },
      NoGil(), py::arg("host"), py::arg("device"), py::kw_only(), py::arg("fast_reduction"), py::arg("nccl_path"),
      "The same ranks, with collectives on the device's memory. Collective; blocks.");
}
