// A GPU as a device::Device.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "zc/cuda/runtime.h"
#include "zc/device/device.h"

namespace zc::cuda {

// Makes a device the calling thread's current one within a scope. The thread may be the framework's, which counts on
// its own choice.
class OnDevice {
 public:
  OnDevice(Runtime& runtime, int device) : runtime_(runtime), before_(runtime.current_device()) {
    if (device != before_) runtime_.set_device(device);
    changed_ = device != before_;
  }
  ~OnDevice();

  // The calling thread is the backend's own and has made no choice: nothing is restored there. It would be device 0,
  // where each process would get a context.
  static void own_thread();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  Runtime& runtime_;
  int before_;
  bool changed_ = false;
};

// From any thread. Its events may be asked and waited for by several threads at a time, once recorded. Memory, streams
// and events may outlive it.
class CudaDevice final : public device::Device {
 public:
  CudaDevice(std::shared_ptr<Runtime> runtime, int index, std::unique_ptr<device::Kernels> kernels)
      : runtime_(std::move(runtime)), index_(index), kernels_(std::move(kernels)) {}

  DeviceId id() const override { return {DeviceType::kCuda, index_}; }
  device::Kernels& kernels() override { return *kernels_; }
  bool runs_behind() const override { return true; }
  Memory allocate(std::int64_t bytes) override;
  Memory allocate_pinned(std::int64_t bytes) override;
  std::shared_ptr<const device::Stream> make_stream() override;
  std::unique_ptr<device::Event> make_event() override;
  void copy(BufferView in, BufferView out, device::Stream stream) override;
  void synchronize(device::Stream stream) override;

  Runtime& runtime() { return *runtime_; }
  std::string name() { return runtime_->device_name(index_); }

 private:
  std::shared_ptr<Runtime> runtime_;
  int index_;
  std::unique_ptr<device::Kernels> kernels_;
  std::mutex zeroing_mutex_;
  std::shared_ptr<const device::Stream> zeroing_;
};

}  // namespace zc::cuda
