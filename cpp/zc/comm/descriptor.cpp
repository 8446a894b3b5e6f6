#include "zc/comm/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <utility>
#include <vector>

namespace zc::comm {
namespace {

// What forked children close. Lives for ever, as fork handlers do.
struct ForkRegistry {
  std::mutex mutex;
  std::vector<int> fds;
};

ForkRegistry& fork_registry() {
  static ForkRegistry& registry = [&]() -> ForkRegistry& {
    static auto* const made = new ForkRegistry;
    pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                   [] {
                     for (const int fd : made->fds) close(fd);
                     made->fds.clear();
                     made->mutex.unlock();
                   });
    return *made;
  }();
  return registry;
}

}  // namespace

Descriptor Descriptor::adopt(const std::function<int()>& make) {
  ForkRegistry& registry = fork_registry();
  std::lock_guard lock(registry.mutex);
  Descriptor descriptor;
  descriptor.fd_ = make();
  if (descriptor.fd_ >= 0) registry.fds.push_back(descriptor.fd_);
  return descriptor;
}

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ < 0) return;
  ForkRegistry& registry = fork_registry();
  std::lock_guard lock(registry.mutex);
  if (std::erase(registry.fds, fd_) > 0) close(fd_);  // in a forked child it is closed, and its number may be another's
}

}  // namespace zc::comm
