#include "zc/comm/self_communicator.h"

#include <cstring>
#include <mutex>

#include "zc/base/float_environment.h"
#include "zc/device/kernels.h"

namespace zc::comm {
namespace {

// Shared by the communicators that split() makes: leaving one leaves all.
struct Presence {
  std::mutex mutex;
  std::string failure;
};

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(Options options, std::shared_ptr<Presence> presence)
      : Communicator(0, 1, options), presence_(std::move(presence)) {}

  const char* backend() const override { return "self"; }

  void set_activity(std::string_view) override {}  // there is no other rank to tell

  void leave(Departure, std::string_view reason, std::chrono::milliseconds) noexcept override {
    try {
      announce_failure(concat("[comm] this rank has left (", reason, ")"));
    } catch (...) {  // out of memory for a message: nobody is there to read it
    }
  }

  void announce_failure(const std::string& reason) noexcept override {
    try {
      std::lock_guard lock(presence_->mutex);
      if (presence_->failure.empty()) presence_->failure = reason;
    } catch (...) {
    }
  }

  std::string failure() const override {
    std::lock_guard lock(presence_->mutex);
    return presence_->failure;
  }

 private:
  Work run(const Call& call) override {
    check_present();
    if (call.meets_only) return {};
    if (call.op == Op::kReduceScatterAdd) {
      const DefaultFloatEnvironment environment;
      const void* const source = call.in.data;
      device::fold(device::cpu_kernels(), {&source, 1}, call.in.dtype, call.out, call.first, {});
    } else if (call.in.bytes() > 0 && call.in.data != call.out.data) {  // a gather
      std::memmove(call.out.data, call.in.data, static_cast<std::size_t>(call.in.bytes()));
    }
    return {};
  }

  std::shared_ptr<Communicator> run_split(const Call&, int, int) override {
    check_present();
    return std::make_shared<SelfCommunicator>(Options{timeout()}, presence_);
  }

  void check_present() const {
    const std::string reason = failure();
    ZC_CHECK(reason.empty(), kComm, reason, ": no collective is possible any more.");
  }

  std::shared_ptr<Presence> presence_;
};

}  // namespace

std::shared_ptr<Communicator> make_self_communicator(Options options) {
  return std::make_shared<SelfCommunicator>(options, std::make_shared<Presence>());
}

}  // namespace zc::comm
