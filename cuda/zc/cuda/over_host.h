// What communicators of device memory have in common: ranks are connected by another one, which carries host memory,
// announcements and the guard.
#pragma once

#include <memory>
#include <string>

#include "zc/comm/communicator.h"
#include "zc/cuda/cuda_device.h"

namespace zc::cuda {

class OverHost : public comm::Communicator {
 public:
  bool takes(DeviceId device) const override { return Communicator::takes(device) || device == device_.id(); }
  Memory allocate(std::int64_t bytes) override { return device_.allocate(bytes); }  // of the device

  void set_activity(std::string_view activity) override { host_->set_activity(activity); }
  void leave(comm::Departure departure, std::string_view reason, std::chrono::milliseconds grace) noexcept override {
    host_->leave(departure, reason, grace);
  }
  std::string watch_processes() override { return host_->watch_processes(); }
  void promise_place() override { host_->promise_place(); }
  bool place_wanted() override { return host_->place_wanted(); }
  void tell_place(std::string_view place) override { host_->tell_place(place); }
  std::string failure() const override { return host_->failure(); }
  void announce_failure(const std::string& reason) noexcept override { host_->announce_failure(reason); }
  void look_for_failures() override { host_->look_for_failures(); }

 protected:
  // device: must outlive it.
  OverHost(std::shared_ptr<comm::Communicator> host, CudaDevice& device)
      : Communicator(host->rank(), host->size(), {host->timeout()}), host_(std::move(host)), device_(device) {}

  // A collective of the device's memory: one of the first four.
  virtual comm::Work run_on_device(const Call& call) = 0;

  std::shared_ptr<comm::Communicator> split_host(int color, int key);

  std::shared_ptr<comm::Communicator> host_;
  CudaDevice& device_;

 private:
  comm::Work run(const Call& call) final;
};

// The collective of host memory that `call` describes, by another communicator.
comm::Work run_by(comm::Communicator& comm, const comm::Communicator::Call& call);

}  // namespace zc::cuda
