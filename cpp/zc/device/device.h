// Where buffers live and kernels run.
#pragma once

#include <memory>

#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/device/kernels.h"

namespace zc::device {

// A point in a stream: where it stood when record() was called last. Not recorded yet counts as done. From any thread,
// one call at a time.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(Stream stream) = 0;

  // Whether everything before that point has finished. Does not wait; throws kDevice when the device has failed.
  virtual bool done() = 0;

  // What is put on `stream` from now on starts after that point. The host does not wait.
  virtual void order(Stream stream) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceId id() const = 0;
  virtual Kernels& kernels() = 0;

  // Whether work goes on after the call that put it on a stream has returned. Else a stream runs at once, and what
  // follows sees its results.
  virtual bool runs_behind() const = 0;

  // Zeroed memory of this device.
  virtual Memory allocate(std::int64_t bytes) = 0;

  // Zeroed host memory that this device copies from and to without holding up the host.
  virtual Memory allocate_pinned(std::int64_t bytes) = 0;

  // A stream of its own, of high priority, as long as the pointer lives.
  virtual std::shared_ptr<const Stream> make_stream() = 0;
  virtual std::unique_ptr<Event> make_event() = 0;

  // Copies the bits of `in` to `out`; equal dtype and numel. In stream order. One of the two may be host memory: it
  // must then stay as it is until the copy is done, also where it is pinned.
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
