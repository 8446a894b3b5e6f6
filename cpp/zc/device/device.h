// Where buffers live and kernels run.
#pragma once

#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/device/kernels.h"

namespace zc::device {

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceId id() const = 0;
  virtual Kernels& kernels() = 0;

  // Zeroed memory of this device.
  virtual Memory allocate(std::int64_t bytes) = 0;

  // Copies the bits of `in` to `out`; equal dtype and numel. In stream order.
  virtual void copy(BufferView in, BufferView out, Stream stream) = 0;

  // Returns when everything put on the stream before has finished.
  virtual void synchronize(Stream stream) = 0;
};

// No device: its memory is addresses only (reserve_addresses). For engines that are built to see what they would
// allocate, and never run.
Device& plan_device();

// The host processor; one instance a process. Its stream runs at once.
Device& cpu_device();

}  // namespace zc::device
