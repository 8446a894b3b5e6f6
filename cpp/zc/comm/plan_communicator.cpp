#include "zc/comm/plan_communicator.h"

namespace zc::comm {
namespace {

class PlanCommunicator final : public Communicator {
 public:
  explicit PlanCommunicator(int size) : Communicator(0, size, {}) {}

  const char* backend() const override { return "plan"; }
  Memory allocate(std::int64_t bytes) override { return reserve_addresses(bytes); }
  Memory allocate_shared(std::int64_t bytes, std::string_view) override { return reserve_addresses(bytes); }
  void set_activity(std::string_view) override {}
  void leave(Departure, std::string_view, std::chrono::milliseconds) noexcept override {}
  void announce_failure(const std::string&) noexcept override {}
  std::string failure() const override { return {}; }

 private:
  Work run(const Call& call) override {
    fail(ErrorKind::kInternal, "[comm] ", name(call.op), " \"", call.label, "\" among ranks that are only planned");
  }

  std::shared_ptr<Communicator> run_split(const Call&, int, int) override {
    return std::make_shared<PlanCommunicator>(size());
  }
};

}  // namespace

std::shared_ptr<Communicator> make_plan_communicator(int size) {
  ZC_CHECK(size >= 1, kConfig, "[comm] a plan for ", size, " ranks: expected at least one.");
  return std::make_shared<PlanCommunicator>(size);
}

}  // namespace zc::comm
