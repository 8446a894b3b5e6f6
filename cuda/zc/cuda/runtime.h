// The calls of the CUDA runtime that this backend makes. Behind an interface, so that everything but the calls
// themselves runs in tests on a machine without a GPU, over a simulation of streams.
//
// Every call checks what CUDA returns and throws kDevice with the call, the place and the device. Handles are
// cudaStream_t and cudaEvent_t.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace zc::cuda {

class Runtime {
 public:
  virtual ~Runtime() = default;

  // Devices that this process sees; 0 where there is no driver, or no device. Never throws, creates no context.
  virtual int num_devices() = 0;
  virtual std::string device_name(int device) = 0;
  virtual std::string device_id(int device) = 0;  // its own among all devices of all hosts
  virtual int num_multiprocessors(int device) = 0;

  // Of the calling thread, for the calls below.
  virtual int current_device() = 0;
  virtual void set_device(int device) = 0;

  // Null: so much is not left.
  virtual void* allocate(std::int64_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  virtual void* allocate_pinned(std::int64_t bytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;

  virtual void copy(void* to, const void* from, std::int64_t bytes, void* stream) = 0;  // host or device, any way
  virtual void zero(void* memory, std::int64_t bytes, void* stream) = 0;

  virtual void* make_stream() = 0;  // of highest priority, not ordered with the default stream
  virtual void free_stream(void* stream) noexcept = 0;
  virtual void synchronize(void* stream) = 0;

  virtual void* make_event() = 0;
  virtual void free_event(void* event) noexcept = 0;
  virtual void record(void* event, void* stream) = 0;
  virtual bool done(void* event) = 0;
  virtual void wait(void* stream, void* event) = 0;  // the stream, for the event
};

// CUDA's. Where the backend is compiled without it (tests), a simulation.
std::shared_ptr<Runtime> make_runtime();

}  // namespace zc::cuda
