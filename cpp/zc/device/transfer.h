// Small values that go between host and device without anybody waiting.
#pragma once

#include <memory>

#include "zc/device/device.h"

namespace zc::device {

// From the host to kernels, again and again: write to host(), then send(). On a device that does not run behind both
// are the same memory.
class Upload {
 public:
  Upload() = default;
  Upload(Device& device, std::int64_t bytes);

  // Where the next values are to be written, all of them: what stood there is gone or on its way. Waits until the copy
  // before the last is done, which is long ago.
  std::byte* host();

  // Puts the copy on the stream. Where kernels that are put on the same stream from now on find it.
  const std::byte* send(Stream stream);

 private:
  struct Buffer {
    Memory host;
    std::unique_ptr<Event> copied;
  };
  Device* device_ = nullptr;
  std::int64_t bytes_ = 0;
  Memory there_;
  Buffer buffers_[2];
  int current_ = 0;
};

// From kernels to the host.
class Download {
 public:
  Download() = default;
  Download(Device& device, std::int64_t bytes);

  std::byte* there() const { return there_.get(); }  // in device memory: for kernels, and where the last values stand

  void fetch(Stream stream);  // puts a copy to host() on the stream
  void wait();                // for the last one; see wait_for()
  const std::byte* host() const { return here_.get(); }

 private:
  Device* device_ = nullptr;
  std::int64_t bytes_ = 0;
  Memory there_;
  Memory here_;
  std::unique_ptr<Event> copied_;
};

// Polls until the event is done: unlike the device's own call for that, it can give up. Throws kDevice after ten
// minutes, which no step takes.
void wait_for(Event& event, const char* what);

}  // namespace zc::device
